//! The commands of a chat: lines that begin with a slash. Pure parsing; the command's loop acts on them.

use std::path::PathBuf;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slash {
    Help,
    /// Forget the conversation.
    Clear,
    /// Show (without a text) or set the system message; `none` removes it.
    System(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    /// Answer the last question again.
    Regen,
    /// Forget the oldest exchange.
    Drop,
    /// Whether a thinking model should think; `None` leaves it to its template.
    Think(Option<bool>),
    Exit,
}

/// What a message turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entered {
    /// Something to say to the model.
    Text(String),
    Command(Slash),
    /// A command that is none; why.
    Wrong(String),
    /// Only white space.
    Nothing,
}

/// What `/help` prints.
pub const HELP: &str = "\
/help            this list
/clear           forget the conversation (the system message stays)
/system [TEXT]   show the system message, set it, or remove it (/system none); the conversation starts anew
/save FILE       write the conversation as JSON
/load FILE       go on with a saved conversation
/stats           tokens and speed of the last reply, and how full the context is
/regen           answer the last question again
/drop            forget the oldest exchange
/think on|off|auto   ask a thinking model to think, or not to
/exit            leave (also /quit, Ctrl-D)
A line that ends in \\ goes on in the next one; between two lines of \"\"\" everything is one message.
// at the start stands for a single slash. Ctrl-C stops a reply.";

/// Reads a message.
pub fn parse(message: &str) -> Entered {
    let trimmed = message.trim();
    let Some(rest) = trimmed.strip_prefix('/') else {
        return if trimmed.is_empty() { Entered::Nothing } else { Entered::Text(message.trim_end().to_string()) };
    };
    if rest.starts_with('/') {
        return Entered::Text(rest.to_string());
    }
    let (name, argument) = rest.split_once(char::is_whitespace).map_or((rest, ""), |(n, a)| (n, a.trim()));
    let file = |make: fn(PathBuf) -> Slash| match argument {
        "" => Entered::Wrong(format!("/{name} needs a file")),
        path => Entered::Command(make(PathBuf::from(path))),
    };
    let plain = |slash: Slash| match argument {
        "" => Entered::Command(slash),
        _ => Entered::Wrong(format!("/{name} takes nothing behind it")),
    };
    match name {
        "help" | "?" => plain(Slash::Help),
        "clear" | "new" => plain(Slash::Clear),
        "system" => Entered::Command(Slash::System((!argument.is_empty()).then(|| argument.to_string()))),
        "save" => file(Slash::Save),
        "load" => file(Slash::Load),
        "stats" => plain(Slash::Stats),
        "regen" => plain(Slash::Regen),
        "drop" => plain(Slash::Drop),
        "think" => match argument {
            "on" => Entered::Command(Slash::Think(Some(true))),
            "off" => Entered::Command(Slash::Think(Some(false))),
            "auto" => Entered::Command(Slash::Think(None)),
            _ => Entered::Wrong("/think takes on, off or auto".into()),
        },
        "exit" | "quit" | "bye" => plain(Slash::Exit),
        _ => Entered::Wrong(format!("there is no command /{name}; /help lists them (// starts a text with a slash)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_text_and_mistakes_are_told_apart() {
        let command = |s| Entered::Command(s);
        assert_eq!(parse("/help"), command(Slash::Help));
        assert_eq!(parse(" /system  be brief "), command(Slash::System(Some("be brief".into()))));
        assert_eq!(parse("/system"), command(Slash::System(None)));
        assert_eq!(parse("/save my talk.json"), command(Slash::Save("my talk.json".into())));
        assert_eq!(parse("/think off"), command(Slash::Think(Some(false))));
        assert_eq!(parse("/bye"), command(Slash::Exit));
        assert_eq!(parse("//etc/hosts is?"), Entered::Text("/etc/hosts is?".into()));
        assert_eq!(parse("  indented\n"), Entered::Text("  indented".into()));
        assert_eq!(parse(" \n"), Entered::Nothing);
        for wrong in ["/save", "/clear now", "/nosuch", "/think maybe", "/"] {
            assert!(matches!(parse(wrong), Entered::Wrong(_)), "{wrong}");
        }
    }

    #[test]
    fn help_lists_every_command() {
        for name in ["help", "clear", "system", "save", "load", "stats", "regen", "drop", "think", "exit"] {
            assert!(HELP.contains(&format!("/{name}")), "{name}");
        }
    }
}
