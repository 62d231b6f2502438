//! Chat: from messages to the prompt a model was trained on, and from its reply to reasoning and answer.
//!
//! The prompt is made by the model's own template (`tokenizer.chat_template`, Jinja as the Hugging Face library runs it)
//! or, where a model has none, by a built-in one. Tokens and sampling do not enter here.

mod date;
mod default;
mod json;
mod reasoning;
mod template;

pub use reasoning::{ReasoningSplitter, ReplyDelta};
pub use template::{ChatError, ChatTemplate, RenderOptions, TemplateOrigin};

use serde::{Deserialize, Serialize};

/// One turn of a conversation, in the shape that templates know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// The text.
    #[serde(default)]
    pub content: String,
    /// What an assistant thought before it answered; templates decide whether to show it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls an assistant made: `{"type": "function", "function": {"name", "arguments"}}`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the speaker, or of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }
}

#[cfg(test)]
mod tests;
