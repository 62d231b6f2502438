//! The template itself: where it comes from, what it sees, and how its failures read.
//!
//! Rendering follows the Hugging Face library: block tags take their line with them (`trim_blocks`, `lstrip_blocks`),
//! strings have Python's methods, `raise_exception`, `strftime_now` and `tojson` are there, and booleans print as
//! Python's. A template is data from a stranger, so the work it may do is bounded.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use hanzo_gguf::{GgufError, Metadata};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde_json::Value as Json;

use super::{Message, date, default, json};
use crate::tokenizer::Tokenizer;

const KEY: &str = "tokenizer.chat_template";
/// The variant for conversations with tools, where a model has one.
const TOOL_USE: &str = "tool_use";
/// The work a rendering may do, in instructions and units of 64 bytes: a long conversation takes less than a tenth.
const FUEL: u64 = 500_000;
/// Stack of the thread that renders. A template can nest values as deep as its fuel lets it, and printing or dropping them
/// recurses: some 70,000 levels. Memory is taken only as it is used.
const STACK: usize = 512 << 20;

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// A key has the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The template does not parse, or fails at a line.
    #[error("chat template `{template}`, line {line}: {message}; `--raw` skips the template")]
    Template {
        /// The metadata key, or the name of a built-in template.
        template: String,
        /// Counted from 1; 0 if it is not known.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// The template refuses the conversation (`raise_exception`).
    #[error("the model's chat template refuses this conversation: {message}")]
    Refused {
        /// The template's words.
        message: String,
    },
    /// There is no such variant, or built-in template.
    #[error("there is no chat template `{name}`; there are: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// Those that exist, separated by commas.
        known: String,
    },
}

/// Where a template comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TemplateOrigin {
    /// The model's metadata.
    Model,
    /// Built in, since the model has none; chosen by the special tokens of its vocabulary.
    BuiltIn(&'static str),
    /// Built in as a guess: the model has none, and its vocabulary fits no format. A base model, probably.
    Guess(&'static str),
    /// Given by the user.
    User,
}

impl std::fmt::Display for TemplateOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TemplateOrigin::Model => f.write_str("from the model"),
            TemplateOrigin::BuiltIn(name) => write!(f, "built-in `{name}`, chosen by the model's special tokens"),
            TemplateOrigin::Guess(name) => write!(f, "built-in `{name}`, a guess: the model may not be made for chat"),
            TemplateOrigin::User => f.write_str("given by the user"),
        }
    }
}

/// What a rendering is told beside the messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Ask a thinking model to think, or not to; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// The functions that the model may call, as JSON schemas.
    pub tools: Vec<Json>,
    /// A variant by name; `None` takes the one for tools if there are tools, else the main one.
    pub variant: Option<String>,
    /// Further variables for the template, such as `reasoning_effort`.
    pub extra: serde_json::Map<String, Json>,
    /// The time that `strftime_now` tells; `None` is now.
    pub now: Option<SystemTime>,
}

impl Default for RenderOptions {
    fn default() -> RenderOptions {
        RenderOptions {
            add_generation_prompt: true,
            enable_thinking: None,
            tools: Vec::new(),
            variant: None,
            extra: serde_json::Map::new(),
            now: None,
        }
    }
}

/// A compiled chat template with its variants.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Variant to template name; the main template is the variant `default`.
    variants: BTreeMap<String, String>,
    origin: TemplateOrigin,
    /// `bos_token` and its kin, for those that the vocabulary has.
    tokens: Vec<(&'static str, String)>,
}

const MAIN: &str = "default";

impl ChatTemplate {
    /// The model's template with its variants, or a built-in one that fits the vocabulary.
    ///
    /// # Errors
    /// [`ChatError::Template`] if the model's template does not parse.
    pub fn from_gguf(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        let mut sources = Vec::new();
        if let Some(main) = metadata.opt_str(KEY)? {
            sources.push((MAIN, KEY.to_owned(), main));
        }
        for (key, value) in metadata.iter() {
            let variant = key.strip_prefix(KEY).and_then(|rest| rest.strip_prefix('.'));
            if let (Some(variant), Some(source)) = (variant, value.as_str()) {
                sources.push((variant, key.to_owned(), source));
            }
        }
        if sources.is_empty() {
            let (named, fits) = default::for_vocabulary(tokenizer);
            let origin = if fits { TemplateOrigin::BuiltIn(named.name) } else { TemplateOrigin::Guess(named.name) };
            return ChatTemplate::compile(&[(MAIN, named.name.to_owned(), named.source)], origin, tokenizer);
        }
        ChatTemplate::compile(&sources, TemplateOrigin::Model, tokenizer)
    }

    /// The built-in template called `name`: one of [`ChatTemplate::built_in`].
    ///
    /// # Errors
    /// [`ChatError::Unknown`] if there is none of that name.
    pub fn named(name: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        let Some(named) = default::ALL.iter().find(|named| named.name == name) else {
            let known = ChatTemplate::built_in().collect::<Vec<_>>().join(", ");
            return Err(ChatError::Unknown { name: name.to_owned(), known });
        };
        let sources = [(MAIN, named.name.to_owned(), named.source)];
        ChatTemplate::compile(&sources, TemplateOrigin::BuiltIn(named.name), tokenizer)
    }

    /// A template from the user.
    ///
    /// # Errors
    /// [`ChatError::Template`] if it does not parse.
    pub fn from_source(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        ChatTemplate::compile(&[(MAIN, "user".to_owned(), source)], TemplateOrigin::User, tokenizer)
    }

    /// The names of the built-in templates.
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        default::ALL.iter().map(|named| named.name)
    }

    /// Compiles `sources`, each a variant, the template's name in errors, and Jinja.
    fn compile(
        sources: &[(&str, String, &str)],
        origin: TemplateOrigin,
        tokenizer: &Tokenizer,
    ) -> Result<ChatTemplate, ChatError> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| failure("", &error))?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(print);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", json::to_json);
        environment.add_test("iterable", is_iterable);
        environment.add_function("raise_exception", raise);

        let mut variants = BTreeMap::new();
        for (variant, name, source) in sources {
            let source = without_generation_tags(source).into_owned();
            environment.add_template_owned(name.clone(), source).map_err(|error| failure(name, &error))?;
            variants.insert((*variant).to_owned(), name.clone());
        }
        let text = |id: u32| String::from_utf8_lossy(tokenizer.piece(id)).into_owned();
        let tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("unk_token", tokenizer.unknown()),
            ("pad_token", tokenizer.padding()),
        ];
        let tokens = tokens.into_iter().filter_map(|(name, id)| Some((name, text(id?)))).collect();
        Ok(ChatTemplate { environment, variants, origin, tokens })
    }

    /// Where the template comes from.
    pub fn origin(&self) -> &TemplateOrigin {
        &self.origin
    }

    /// The variants' names; the main one is called `default`.
    pub fn variants(&self) -> impl Iterator<Item = &str> {
        self.variants.keys().map(String::as_str)
    }

    /// The Jinja text of a variant.
    pub fn source(&self, variant: &str) -> Option<String> {
        let name = self.variants.get(variant)?;
        self.environment.get_template(name).ok().map(|template| template.source().to_owned())
    }

    /// The prompt for `messages`. Encode it with [`ParseSpecial::Yes`](crate::tokenizer::ParseSpecial) and
    /// [`AddSpecial::IfMissing`](crate::tokenizer::AddSpecial): some templates write BOS themselves, some do not.
    ///
    /// # Errors
    /// [`ChatError::Refused`] if the template raises an exception, [`ChatError::Template`] if it fails.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        let name = self.choose(options)?;
        let mut context = BTreeMap::new();
        for (key, value) in &self.tokens {
            context.insert((*key).to_owned(), Value::from(value.as_str()));
        }
        for (key, value) in &options.extra {
            context.insert(key.clone(), Value::from(Serde(value)));
        }
        let now = options.now;
        let strftime_now =
            move |pattern: &str| -> String { date::format(pattern, now.unwrap_or_else(SystemTime::now)) };
        let mut set = |key: &str, value: Value| context.insert(key.to_owned(), value);
        set("messages", Value::from(Serde(messages)));
        set("add_generation_prompt", Value::from(options.add_generation_prompt));
        set("strftime_now", Value::from_function(strftime_now));
        // Templates ask `if tools`, or `tools is none`, or `tools is defined`: None answers all three.
        set("tools", if options.tools.is_empty() { Value::from(()) } else { Value::from(Serde(&options.tools)) });
        if let Some(enable) = options.enable_thinking {
            set("enable_thinking", Value::from(enable));
        }
        let render = || self.environment.get_template(name).and_then(|template| template.render(context));
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("chat-template".into()).stack_size(STACK);
            match thread.spawn_scoped(scope, || render().map_err(|error| failure(name, &error))).map(|t| t.join()) {
                Ok(Ok(rendered)) => rendered,
                Ok(Err(_)) | Err(_) => {
                    Err(ChatError::Refused { message: "the template could not be run: no thread for it".into() })
                }
            }
        })
    }

    /// The name of the template that `options` ask for.
    fn choose(&self, options: &RenderOptions) -> Result<&str, ChatError> {
        let wanted = match &options.variant {
            Some(variant) => variant,
            None if !options.tools.is_empty() && self.variants.contains_key(TOOL_USE) => TOOL_USE,
            None => MAIN,
        };
        let found = self.variants.get(wanted).or_else(|| {
            // A model may have named variants only.
            if options.variant.is_none() { self.variants.values().next() } else { None }
        });
        found.map(String::as_str).ok_or_else(|| ChatError::Unknown {
            name: wanted.to_owned(),
            known: self.variants().collect::<Vec<_>>().join(", "),
        })
    }
}

/// Prints a value as Python would.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::None => Ok(out.write_str("None")?),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Whether Python can iterate over a value: not over None, whatever Jinja thinks here.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// What `raise_exception` leaves in an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised(message.to_owned())))
}

fn failure(template: &str, error: &Error) -> ChatError {
    let mut line = error.line();
    let mut message =
        error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return ChatError::Refused { message: message.clone() };
        }
        if let Some(inner) = inner.downcast_ref::<Error>() {
            line = inner.line().or(line);
            message = inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned);
        }
        cause = inner.source();
    }
    ChatError::Template { template: template.to_owned(), line: line.unwrap_or(0), message }
}

/// `{% generation %}` marks what an assistant has said, for training; here it is a block that is always taken.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}").map(|length| open + length) else { break };
        let inside = &rest[open + 2..close];
        let word = inside.trim_matches(|char: char| char.is_whitespace() || matches!(char, '-' | '+'));
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&inside.replacen(word, "if true", 1)),
            "endgeneration" => out.push_str(&inside.replacen(word, "endif", 1)),
            _ => out.push_str(inside),
        }
        out.push_str("%}");
        rest = &rest[close + 2..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}
