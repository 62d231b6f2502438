//! What was said so far: pure data, with its form as a file.

use std::path::Path;

use anyhow::Context as _;
use hanzo_engine::chat::Message;
use serde_json::{Value, json};

use crate::failure::Failure;

/// A system message, if any, and turns of user and assistant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    messages: Vec<Message>,
}

impl Conversation {
    /// With a system message, if there is one to be.
    pub fn new(system: Option<&str>) -> Conversation {
        let mut conversation = Conversation::default();
        conversation.set_system(system);
        conversation
    }

    /// All messages in order.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.messages.first().filter(|m| m.role == "system").map(|m| m.content.as_str())
    }

    /// Replaces or removes the system message.
    pub fn set_system(&mut self, text: Option<&str>) {
        if self.system().is_some() {
            self.messages.remove(0);
        }
        if let Some(text) = text {
            self.messages.insert(0, Message::new("system", text));
        }
    }

    /// Adds what the user says.
    pub fn user(&mut self, text: &str) {
        self.messages.push(Message::new("user", text));
    }

    /// Adds what the assistant said, and what it thought before.
    pub fn assistant(&mut self, answer: &str, reasoning: &str) {
        let reasoning = (!reasoning.is_empty()).then(|| reasoning.to_string());
        self.messages.push(Message { reasoning_content: reasoning, ..Message::new("assistant", answer) });
    }

    /// Takes back the user's last message, if nobody has answered it.
    pub fn withdraw(&mut self) {
        if self.messages.last().is_some_and(|m| m.role == "user") {
            self.messages.pop();
        }
    }

    /// Takes back the last answer; false if there is none.
    pub fn forget_answer(&mut self) -> bool {
        let there = self.messages.last().is_some_and(|m| m.role == "assistant");
        if there {
            self.messages.pop();
        }
        there
    }

    /// Forgets everything but the system message.
    pub fn clear(&mut self) {
        let keep = usize::from(self.system().is_some());
        self.messages.truncate(keep);
    }

    /// Forgets the oldest exchange; false if only the last user message would remain to be forgotten.
    pub fn drop_oldest(&mut self) -> bool {
        let start = usize::from(self.system().is_some());
        let next = self.messages.iter().skip(start + 1).position(|m| m.role == "user").map(|at| start + 1 + at);
        let end = match next {
            Some(end) => end,
            None if self.messages.last().is_some_and(|m| m.role == "assistant") => self.messages.len(),
            None => return false,
        };
        self.messages.drain(start..end);
        end > start
    }

    /// Writes the messages as JSON.
    pub fn save(&self, file: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(&json!({"messages": self.messages}))?;
        std::fs::write(file, text + "\n").with_context(|| format!("cannot write `{}`", file.display()))
    }

    /// Reads what [`Conversation::save`] wrote, or a plain list of messages.
    pub fn load(file: &Path) -> anyhow::Result<Conversation> {
        let unusable = |cause: anyhow::Error| {
            Failure::new(format!("cannot read the conversation `{}`", file.display()))
                .because(cause)
                .remedy("it must be JSON as /save writes it: {\"messages\": [{\"role\", \"content\"}, ...]}")
        };
        let read = || -> anyhow::Result<Conversation> {
            let value: Value = serde_json::from_slice(&std::fs::read(file)?)?;
            let list = if value.is_array() { value } else { value.get("messages").cloned().unwrap_or(Value::Null) };
            Ok(Conversation { messages: serde_json::from_value(list)? })
        };
        let mut conversation = read().map_err(unusable)?;
        // A question that nobody answered would stand before the next one.
        conversation.withdraw();
        Ok(conversation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_turns(system: Option<&str>) -> Conversation {
        let mut c = Conversation::new(system);
        for i in 0..3 {
            c.user(&format!("q{i}"));
            c.assistant(&format!("a{i}"), "");
        }
        c
    }

    fn texts(c: &Conversation) -> Vec<&str> {
        c.messages().iter().map(|m| m.content.as_str()).collect()
    }

    #[test]
    fn the_system_message_is_set_replaced_removed_and_survives_clearing() {
        let mut c = three_turns(Some("s"));
        c.set_system(Some("t"));
        assert_eq!((c.system(), c.messages().len()), (Some("t"), 7));
        c.clear();
        assert_eq!(texts(&c), ["t"]);
        c.set_system(None);
        assert!(c.messages().is_empty());
    }

    #[test]
    fn the_oldest_exchange_goes_first_and_the_open_question_never() {
        let mut c = three_turns(Some("s"));
        c.user("open");
        assert!(c.drop_oldest());
        assert_eq!(texts(&c), ["s", "q1", "a1", "q2", "a2", "open"]);
        assert!(c.drop_oldest() && c.drop_oldest());
        assert!(!c.drop_oldest());
        assert_eq!(texts(&c), ["s", "open"]);
        c.withdraw();
        assert!(!c.drop_oldest());
        let mut whole = three_turns(None);
        assert!(whole.drop_oldest() && whole.drop_oldest() && whole.drop_oldest() && !whole.drop_oldest());
        assert!(whole.messages().is_empty());
    }

    #[test]
    fn what_is_saved_is_loaded_and_a_plain_list_too() {
        let file = std::env::temp_dir().join(format!("hanzo-chat-test-{}.json", std::process::id()));
        let mut c = three_turns(Some("s"));
        c.assistant("b", "because");
        c.save(&file).unwrap();
        assert_eq!(Conversation::load(&file).unwrap(), c);
        std::fs::write(&file, r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]"#).unwrap();
        assert_eq!(texts(&Conversation::load(&file).unwrap()), ["q", "a"]);
        std::fs::write(&file, "{}").unwrap();
        assert!(Conversation::load(&file).is_err());
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn only_an_answer_is_forgotten_and_only_a_question_withdrawn() {
        let mut c = three_turns(None);
        c.withdraw();
        assert_eq!(c.messages().len(), 6);
        assert!(c.forget_answer());
        assert!(!c.forget_answer());
        c.withdraw();
        assert_eq!(texts(&c), ["q0", "a0", "q1", "a1"]);
    }
}
