//! Templates for models that bring none, written for this engine after the formats' published descriptions.
//!
//! A format is chosen by the special tokens it is made of; where a vocabulary has none of them, ChatML is as good as any.

use crate::tokenizer::Tokenizer;

/// A built-in template.
pub(super) struct Named {
    /// How users call it.
    pub name: &'static str,
    /// Special tokens that all must be there for it to be chosen.
    markers: &'static [&'static str],
    /// Jinja.
    pub source: &'static str,
}

const CHATML: Named = Named {
    name: "chatml",
    markers: &["<|im_start|>", "<|im_end|>"],
    source: "\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
",
};

/// Gemma has no system role: what it would say opens the first user turn.
const GEMMA: Named = Named {
    name: "gemma",
    markers: &["<start_of_turn>", "<end_of_turn>"],
    source: "\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set ns.system = ns.system + message.content.strip() + '\\n\\n' %}
{%- else %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (ns.system if role == 'user' else '') + message.content.strip() + '<end_of_turn>\\n' }}
{%- if role == 'user' %}{% set ns.system = '' %}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
",
};

const LLAMA3: Named = Named {
    name: "llama3",
    markers: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    source: "\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content.strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
",
};

const PHI3: Named = Named {
    name: "phi3",
    markers: &["<|user|>", "<|assistant|>", "<|end|>"],
    source: "\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
",
};

/// Every built-in template; the first is the last resort.
pub(super) static ALL: [Named; 4] = [CHATML, GEMMA, LLAMA3, PHI3];

/// The template whose tokens the vocabulary has; else ChatML, and false.
pub(super) fn for_vocabulary(tokenizer: &Tokenizer) -> (&'static Named, bool) {
    let fits = |named: &&Named| named.markers.iter().all(|marker| tokenizer.special_id(marker).is_some());
    match ALL.iter().find(fits) {
        Some(named) => (named, true),
        None => (&ALL[0], false),
    }
}
