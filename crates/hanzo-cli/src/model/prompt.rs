//! From text to the tokens of a prompt, by the model's chat template or as it is.

use hanzo_engine::chat::{ChatTemplate, Message, ReasoningSplitter, RenderOptions, TemplateOrigin};
use hanzo_engine::model::Model;
use hanzo_engine::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

use crate::cli::Context;
use crate::failure::Failure;

/// Tokens to evaluate, and how to read the reply.
pub struct Prompt {
    pub ids: Vec<u32>,
    /// Splits reasoning from the answer; `None` for raw text.
    pub reasoning: Option<ReasoningSplitter>,
}

/// The model's tokenizer, or a failure that says why there is none.
pub fn tokenizer(model: &Model) -> anyhow::Result<&Tokenizer> {
    model.tokenizer().map_err(|e| {
        Failure::new("this model cannot read or write text")
            .because(anyhow::anyhow!("{e}"))
            .remedy("convert the model again with its tokenizer, or use another one")
            .into()
    })
}

/// The template of a model; says when it is only a guess.
pub fn template(model: &Model, context: &Context) -> anyhow::Result<ChatTemplate> {
    let template = ChatTemplate::from_gguf(model.gguf().metadata(), tokenizer(model)?)?;
    if let TemplateOrigin::Guess(_) = template.origin() {
        context.note(format_args!("note: chat template {}; `--raw` uses none", template.origin()));
    }
    Ok(template)
}

/// A conversation, rendered so that the assistant speaks next.
pub fn chat(
    model: &Model,
    template: &ChatTemplate,
    messages: &[Message],
    thinking: Option<bool>,
) -> anyhow::Result<Prompt> {
    let options = RenderOptions { enable_thinking: thinking, ..RenderOptions::default() };
    let text = template.render(messages, &options)?;
    let ids = tokenizer(model)?.encode(&text, AddSpecial::IfMissing, ParseSpecial::Yes);
    Ok(Prompt { ids, reasoning: Some(ReasoningSplitter::new(&text)) })
}

/// Text as it is.
pub fn raw(model: &Model, text: &str) -> anyhow::Result<Prompt> {
    let ids = tokenizer(model)?.encode(text, AddSpecial::Always, ParseSpecial::Yes);
    if ids.is_empty() {
        return Err(Failure::usage("the prompt is empty").into());
    }
    Ok(Prompt { ids, reasoning: None })
}
