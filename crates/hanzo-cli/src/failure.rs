//! Failures as a user sees them: what went wrong, why, and what to do about it.
//!
//! A command returns `anyhow::Result`; where a remedy is known it returns a [`Failure`]. Formatting of
//! errors lives here, and nothing that could itself fail.

use std::fmt;

/// An error with a remedy and an exit code. It may stand anywhere in an `anyhow` chain.
#[derive(Debug)]
pub struct Failure {
    message: String,
    remedy: Option<String>,
    cause: Option<anyhow::Error>,
    code: u8,
}

impl Failure {
    /// A failure (exit code 1) that says `message`: what failed, naming the file, URL or field.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), remedy: None, cause: None, code: 1 }
    }

    /// Bad usage that the grammar could not catch (exit code 2).
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { code: 2, ..Failure::new(message) }
    }

    /// Adds what the user can do about it.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = Some(remedy.into());
        self
    }

    /// Adds the underlying error.
    pub fn because(mut self, cause: impl Into<anyhow::Error>) -> Failure {
        self.cause = Some(cause.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_ref().map(|c| c.as_ref())
    }
}

/// The message for a terminal: `error: ...`, one `  because: ...` per cause, one `  remedy: ...` per remedy.
pub fn report(error: &anyhow::Error) -> String {
    let mut lines = Vec::new();
    let mut remedies: Vec<&str> = Vec::new();
    let mut last = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Libraries often repeat their cause in their own message: say it once.
        if lines.is_empty() {
            lines.push(format!("error: {text}"));
        } else if !last.contains(&text) {
            lines.push(format!("  because: {text}"));
        }
        last = text;
        if let Some(remedy) = cause.downcast_ref::<Failure>().and_then(|f| f.remedy.as_deref())
            && !remedies.contains(&remedy)
        {
            remedies.push(remedy);
        }
    }
    lines.extend(remedies.iter().map(|r| format!("  remedy: {r}")));
    lines.join("\n")
}

/// The exit code after Ctrl-C: 128 plus the signal's number, as shells have it.
pub const INTERRUPTED: u8 = 130;

/// Ctrl-C ended the work. The user knows: nothing is printed, and the exit code is [`INTERRUPTED`].
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// True if the error is only that the user pressed Ctrl-C.
pub fn is_interrupted(error: &anyhow::Error) -> bool {
    error.chain().any(|c| c.is::<Interrupted>())
}

/// The exit code an error asks for: that of the outermost [`Failure`], else 1.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(|c| c.downcast_ref::<Failure>()).map_or(1, |f| f.code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    #[test]
    fn a_report_names_the_causes_and_the_remedy_under_any_context() {
        let io = std::io::Error::other("disk on fire");
        let failure = Failure::new("cannot write `x.gguf`").because(io).remedy("put out the fire");
        let error = Err::<(), _>(failure).context("pulling `x`").unwrap_err();
        let expected =
            "error: pulling `x`\n  because: cannot write `x.gguf`\n  because: disk on fire\n  remedy: put out the fire";
        assert_eq!(report(&error), expected);
        assert_eq!(exit_code(&error), 1);
        assert_eq!(exit_code(&Failure::usage("no").into()), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("plain")), 1);
    }
}
