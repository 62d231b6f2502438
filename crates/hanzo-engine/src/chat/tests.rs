//! Small templates of our own that lean on the features the real ones lean on.

use std::time::{Duration, UNIX_EPOCH};

use hanzo_gguf::{Array, Metadata, Value};
use serde_json::json;

use super::*;
use crate::tokenizer::Tokenizer;

/// A vocabulary of control tokens and the letter a.
fn metadata(special: &[&str]) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", Value::Array(Array::strings(["a"].iter().chain(special))));
    let kinds: Vec<i32> = [1].into_iter().chain(special.iter().map(|_| 3)).collect();
    metadata.set("tokenizer.ggml.token_type", Value::Array(Array::from(kinds)));
    metadata.set("tokenizer.ggml.merges", Value::Array(Array::strings::<&str>([])));
    metadata.set("tokenizer.ggml.bos_token_id", Value::U32(1));
    metadata.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    metadata
}

fn template_of(metadata: &Metadata) -> Result<ChatTemplate, ChatError> {
    let tokenizer = Tokenizer::from_gguf(metadata).expect("a tokenizer");
    ChatTemplate::from_gguf(metadata, &tokenizer)
}

fn try_render(source: &str, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
    let mut metadata = metadata(&["<s>", "</s>"]);
    metadata.set("tokenizer.chat_template", source);
    template_of(&metadata)?.render(messages, options)
}

fn render(source: &str, messages: &[Message]) -> String {
    try_render(source, messages, &RenderOptions::default()).expect("renders")
}

fn talk() -> Vec<Message> {
    vec![
        Message::new("system", "Be brief."),
        Message::new("user", " Hi & <b>? "),
        Message::new("assistant", "<think>\nhm\n</think>\n\nHello."),
        Message::new("user", "Bye"),
    ]
}

#[test]
fn block_tags_take_their_line_with_them() {
    let source = "{% for message in messages %}\n  {% if message.role == 'user' %}\n[{{ message.content }}]\n  {% endif %}\n{% endfor %}\nend\n";
    assert_eq!(render(source, &talk()), "[ Hi & <b>? ]\n[Bye]\nend");
}

#[test]
fn templates_see_tokens_slices_namespaces_and_loops() {
    let source = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0].content %}\
        {% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
        {% set ns = namespace(last=-1) %}\
        {% for m in messages[::-1] %}{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}\
        {% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
        {{ loop.index0 }}{{ '*' if loop.last else '' }}:{{ m.content | trim }}{{ eos_token }}{% endfor %}\
        {{ system is defined }}{{ ns.last }}{{ missing is defined }}{{ none }}";
    assert_eq!(
        render(source, &talk()),
        "<s>0:Hi & <b>?</s>1:<think>\nhm\n</think>\n\nHello.</s>2*:Bye</s>True3FalseNone"
    );
    match try_render(source, &talk()[1..3], &RenderOptions::default()) {
        Ok(text) => assert!(text.starts_with("<s>0:Hi")),
        Err(error) => panic!("{error}"),
    }
    let refused = try_render(source, &talk()[2..], &RenderOptions::default());
    assert!(matches!(refused, Err(ChatError::Refused { message }) if message == "roles must alternate"));
}

#[test]
fn strings_have_the_methods_of_python() {
    let source = "{% set c = messages[2].content %}\
        {{ c.split('</think>')[-1].lstrip('\\n') }}|{{ c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].strip() }}|\
        {{ c.startswith('<think>') }}|{{ '<think>' not in c }}|{{ messages[1].content.strip().upper() }}|{{ 'a-b'.replace('-', '+') }}|\
        {{ messages[0].get('name', 'nobody') }}|{{ messages[0].role.title() }}|{{ c is string }}|{{ messages is iterable }}|{{ messages[0] is mapping }}|\
        {% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}";
    assert_eq!(render(source, &talk()), "Hello.|hm|True|False|HI & <B>?|a+b|nobody|System|True|True|True|x=1");
}

#[test]
fn macros_and_generation_blocks_work() {
    let source = "{% macro turn(role, text) %}<{{ role }}>{{ text }}{% endmacro %}\
        {% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ turn('bot', m.content|length) }}{% endgeneration %}{% else %}{{ turn(m.role, m.content|length) }}{% endif %}{% endfor %}\
        {%- if add_generation_prompt %}<bot>{% endif %}";
    assert_eq!(render(source, &talk()), "<system>9<user>11<bot>27<user>3<bot>");
}

#[test]
fn thinking_is_switched_by_the_caller() {
    let source = "{%- if add_generation_prompt %}A\n{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}";
    let with = |enable_thinking| {
        try_render(source, &[], &RenderOptions { enable_thinking, ..RenderOptions::default() }).expect("renders")
    };
    assert_eq!(with(None), "A");
    assert_eq!(with(Some(true)), "A");
    assert_eq!(with(Some(false)), "A<think></think>");
    let options = RenderOptions { add_generation_prompt: false, ..RenderOptions::default() };
    assert_eq!(try_render(source, &[], &options).expect("renders"), "");
}

#[test]
fn json_is_written_as_python_writes_it() {
    let tools = vec![json!({"name": "f", "z": [1, 2.5, true, null], "a": {"q\"<&>'": "é\n"}, "e": [], "o": {}})];
    let options = RenderOptions { tools, ..RenderOptions::default() };
    let text = try_render("{% for t in tools %}{{ t | tojson }}{% endfor %}", &[], &options).expect("renders");
    assert_eq!(text, r#"{"name": "f", "z": [1, 2.5, true, null], "a": {"q\"<&>'": "é\n"}, "e": [], "o": {}}"#);
    let text = try_render("{{ {'b': [1, {}], 'a': 2} | tojson(indent=2) }}", &[], &options).expect("renders");
    assert_eq!(text, "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": 2\n}");
    assert_eq!(render("{{ tools is none }}{{ not tools }}{{ tools is defined }}", &[]), "TrueTrueTrue");
    assert_eq!(render("{{ tools is iterable }}{{ 'x' is iterable }}{{ nothing is iterable }}", &[]), "FalseTrueTrue");
    assert_eq!(render("{{ 'é🙂' | tojson(ensure_ascii=True) }}", &[]), r#""\u00e9\ud83d\ude42""#);
}

#[test]
fn tool_calls_reach_the_template() {
    let mut call = Message::new("assistant", "");
    call.tool_calls = vec![json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}})];
    let source = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% set c = c.function %}{{ c.name }}({{ c.arguments | tojson }}){% endfor %}{% else %}-{% endif %}{% endfor %}";
    assert_eq!(render(source, &[call, Message::new("user", "x")]), "f({\"x\": 1})-");
}

#[test]
fn the_date_is_the_callers() {
    let now = Some(UNIX_EPOCH + Duration::from_secs(951_782_400));
    let options = RenderOptions { now, ..RenderOptions::default() };
    assert_eq!(try_render("{{ strftime_now('%d %b %Y') }}", &[], &options).expect("renders"), "29 Feb 2000");
}

#[test]
fn errors_name_the_template_and_its_line() {
    let broken = try_render("a\n{% if %}\n", &[], &RenderOptions::default()).expect_err("does not parse");
    assert!(broken.to_string().contains("`tokenizer.chat_template`, line 2"), "{broken}");
    let failing = try_render("\n\n{{ messages.nope() }}", &[], &RenderOptions::default()).expect_err("fails");
    assert!(failing.to_string().contains("line 3"), "{failing}");
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    assert!(try_render(endless, &[], &RenderOptions::default()).is_err());
}

#[test]
fn variants_are_chosen_by_name_and_by_tools() {
    let mut metadata = metadata(&["<s>", "</s>"]);
    metadata.set("tokenizer.chat_template", "main");
    metadata.set("tokenizer.chat_template.tool_use", "tools");
    metadata.set("tokenizer.chat_template.rag", "rag");
    let template = template_of(&metadata).expect("compiles");
    assert_eq!(template.origin(), &TemplateOrigin::Model);
    assert_eq!(template.variants().collect::<Vec<_>>(), ["default", "rag", "tool_use"]);
    let with = |options: RenderOptions| template.render(&[], &options);
    assert_eq!(with(RenderOptions::default()).expect("renders"), "main");
    assert_eq!(with(RenderOptions { tools: vec![json!({})], ..RenderOptions::default() }).expect("renders"), "tools");
    let variant = |name: &str| RenderOptions { variant: Some(name.to_owned()), ..RenderOptions::default() };
    assert_eq!(with(variant("rag")).expect("renders"), "rag");
    let error = with(variant("nope")).expect_err("unknown");
    assert!(error.to_string().contains("default, rag, tool_use"), "{error}");
}

#[test]
fn a_model_without_a_template_gets_one_that_fits_its_vocabulary() {
    let conversation = [Message::new("system", "S"), Message::new("user", "U"), Message::new("assistant", "A")];
    let cases: [(&[&str], _, _); 5] = [
        (
            &["<|im_start|>", "<|im_end|>"],
            TemplateOrigin::BuiltIn("chatml"),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            &["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
            TemplateOrigin::BuiltIn("gemma"),
            "<bos><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            &["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
            TemplateOrigin::BuiltIn("llama3"),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            &["<s>", "<|end|>", "<|user|>", "<|assistant|>"],
            TemplateOrigin::BuiltIn("phi3"),
            "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|assistant|>\n",
        ),
        (
            &["<s>", "</s>"],
            TemplateOrigin::Guess("chatml"),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n",
        ),
    ];
    for (special, origin, expected) in cases {
        let template = template_of(&metadata(special)).expect("compiles");
        assert_eq!(template.origin(), &origin);
        assert_eq!(template.render(&conversation, &RenderOptions::default()).expect("renders"), expected);
    }
}

#[test]
fn built_in_templates_are_found_by_name() {
    let metadata = metadata(&["<s>", "</s>"]);
    let tokenizer = Tokenizer::from_gguf(&metadata).expect("a tokenizer");
    for name in ChatTemplate::built_in() {
        assert!(ChatTemplate::named(name, &tokenizer).is_ok());
    }
    let error = ChatTemplate::named("vicuna", &tokenizer).expect_err("unknown");
    assert!(error.to_string().contains("chatml, gemma, llama3, phi3"), "{error}");
    assert!(ChatTemplate::from_source("{{ messages|length }}", &tokenizer).is_ok());
}

#[test]
fn a_template_that_nests_values_without_end_is_an_answer_or_an_error_but_no_crash() {
    let tokenizer = Tokenizer::from_gguf(&metadata(&["<s>", "</s>"])).expect("a tokenizer");
    for (n, end) in [20_000, 50_000, 70_000, 100_000]
        .into_iter()
        .flat_map(|n| ["{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x|string|length }}", ""].map(|end| (n, end)))
    {
        let deep = format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range({n}) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}"
        );
        let template = ChatTemplate::from_source(&(deep + end), &tokenizer).expect("it parses");
        let _ = template.render(&[Message::new("user", "hi")], &RenderOptions::default());
    }
    let endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let template = ChatTemplate::from_source(endless, &tokenizer).expect("it parses");
    assert!(template.render(&[], &RenderOptions::default()).is_err());
}
