//! Headers of op and format files; see KERNEL-C.md for the grammar.

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderError {
    /// The file's name.
    pub file: String,
    /// The line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

impl std::fmt::Display for HeaderError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

impl std::error::Error for HeaderError {}

/// Which format files an op is built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Formats {
    /// None: the op reads no weight.
    None,
    /// The packed block formats.
    Block,
    /// F32, F16 and BF16.
    Float,
    /// Both.
    All,
}

/// Whether a format's elements are codes with scales or floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It has `unit`.
    Block,
    /// It has `floats`.
    Float,
}

/// What an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgKind {
    /// A weight in device layout.
    Weight,
    /// A read-only pointer.
    Ro,
    /// A pointer that is only written.
    Wo,
    /// A pointer that is read and written.
    Rw,
    /// A number.
    U32,
    /// A number.
    F32,
}

impl ArgKind {
    /// Bytes and alignment.
    pub fn size(self) -> (usize, usize) {
        match self {
            ArgKind::Weight => (32, 8),
            ArgKind::Ro | ArgKind::Wo | ArgKind::Rw => (8, 8),
            ArgKind::U32 | ArgKind::F32 => (4, 4),
        }
    }
}

/// An argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arg {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: ArgKind,
    /// The comment behind it.
    pub doc: String,
}

/// An array in workgroup memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Element type, a word.
    pub ty: String,
    /// Its name.
    pub name: String,
    /// Elements: an expression of constants.
    pub size: String,
}

/// A file of `ops/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpFile {
    /// The op's name.
    pub name: String,
    /// The comment on top.
    pub doc: String,
    /// The only backend it is for (files in a folder below `ops/`).
    pub backend: Option<String>,
    /// What it is built with.
    pub formats: Formats,
    /// Tuning constants and their defaults, THREADS first.
    pub constants: Vec<(String, u32)>,
    /// Its arguments.
    pub args: Vec<Arg>,
    /// Its workgroup memory.
    pub shared: Vec<Shared>,
    /// Stages the format's codebook in workgroup memory.
    pub grid: bool,
    /// Its workgroup memory may be more than every launch gets: CUDA's launches ask for it.
    pub asks: bool,
    /// The text behind `---`.
    pub body: String,
}

/// A file of `formats/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatFile {
    /// GGUF name.
    pub name: String,
    /// The comment on top.
    pub doc: String,
    /// Elements of a block.
    pub block_len: u32,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Codes or floats.
    pub class: Class,
    /// Codes that share a scale: 16 or 32.
    pub group: u32,
    /// Has minima.
    pub min: bool,
    /// Bytes of a block in each plane.
    pub planes: Vec<u32>,
    /// Its codebook.
    pub table: Option<String>,
    /// The text behind `---`.
    pub body: String,
}

/// Header lines as `(line number, words, comment)`, the comment on top, and the body.
type Split<'a> = (Vec<(usize, Vec<&'a str>, &'a str)>, String, String);

fn split<'a>(file: &str, text: &'a str) -> Result<Split<'a>, HeaderError> {
    let whole = |what: &str| HeaderError { file: file.into(), line: 0, what: what.into() };
    let (header, body) = text.split_once("\n---\n").ok_or_else(|| whole("no line `---` between header and body"))?;
    let mut lines = Vec::new();
    let mut doc = String::new();
    for (i, line) in header.lines().enumerate() {
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        let words: Vec<&str> = code.split_whitespace().collect();
        if !words.is_empty() {
            lines.push((i + 1, words, comment.trim()));
        } else if lines.is_empty() && !comment.trim().is_empty() {
            doc.push_str(if doc.is_empty() { "" } else { " " });
            doc.push_str(comment.trim());
        }
    }
    if doc.is_empty() {
        return Err(whole("no comment on top that says what it is"));
    }
    Ok((lines, doc, body.to_string()))
}

fn is_name(s: &str) -> bool {
    s.bytes().enumerate().all(|(i, b)| b == b'_' || b.is_ascii_alphabetic() || i > 0 && b.is_ascii_digit())
        && !s.is_empty()
}

impl OpFile {
    /// Parses a file of `ops/`. `backend` is the folder it lies in, if any.
    pub fn parse(file: &str, text: &str, backend: Option<&str>) -> Result<OpFile, HeaderError> {
        let (lines, doc, body) = split(file, text)?;
        let mut op = OpFile {
            name: String::new(),
            doc,
            backend: backend.map(str::to_string),
            formats: Formats::None,
            constants: Vec::new(),
            args: Vec::new(),
            shared: Vec::new(),
            grid: false,
            asks: false,
            body,
        };
        for (line, words, comment) in &lines {
            let bad = |what: String| HeaderError { file: file.into(), line: *line, what };
            let arg = |kind: ArgKind, name: &str| Arg { name: name.into(), kind, doc: comment.to_string() };
            let kind = match words[0] {
                "weight" => Some(ArgKind::Weight),
                "ro" => Some(ArgKind::Ro),
                "wo" => Some(ArgKind::Wo),
                "rw" => Some(ArgKind::Rw),
                "u32" => Some(ArgKind::U32),
                "f32" => Some(ArgKind::F32),
                _ => None,
            };
            match (kind, &words[..]) {
                (Some(kind), [_, name]) if is_name(name) => op.args.push(arg(kind, name)),
                (_, ["kernel", name]) if is_name(name) => op.name = name.to_string(),
                (_, ["formats", which]) => {
                    op.formats = match *which {
                        "none" => Formats::None,
                        "block" => Formats::Block,
                        "float" => Formats::Float,
                        "all" => Formats::All,
                        w => return Err(bad(format!("formats are none, block, float or all, not {w}"))),
                    }
                }
                (_, ["const", name, "=", value]) if is_name(name) => {
                    let value = value.parse().map_err(|_| bad(format!("{value} is not a u32")))?;
                    op.constants.push((name.to_string(), value));
                }
                (_, ["grid"]) => op.grid = true,
                (_, ["asks"]) => op.asks = true,
                (_, ["shared", ty, rest @ ..]) => {
                    let rest = rest.join(" ");
                    let parts = rest.split_once('[').and_then(|(n, s)| Some((n.trim(), s.strip_suffix(']')?.trim())));
                    let (name, size) = parts.ok_or_else(|| bad("expected: shared TYPE NAME[SIZE]".into()))?;
                    op.shared.push(Shared { ty: ty.to_string(), name: name.into(), size: size.into() });
                }
                _ => return Err(bad(format!("cannot read `{}`", words.join(" ")))),
            }
        }
        let whole = |what: String| Err(HeaderError { file: file.into(), line: 0, what });
        if op.name.is_empty() {
            return whole("no line `kernel NAME`".into());
        }
        if op.constants.first().is_none_or(|c| c.0 != "THREADS") {
            return whole("the first constant must be THREADS, the workgroup size".into());
        }
        if op.body.matches("KERNEL {").count() != 1 {
            return whole("the body must have exactly one `KERNEL {`".into());
        }
        if op.layout().0 > 128 {
            return whole(format!("the arguments take {} bytes of 128: put some behind a pointer", op.layout().0));
        }
        if (op.formats == Formats::None) == op.args.iter().any(|a| a.kind == ArgKind::Weight) && op.name != "pack" {
            return whole("an op has `formats` if and only if it has a `weight`".into());
        }
        Ok(op)
    }
}

impl FormatFile {
    /// Parses a file of `formats/`.
    pub fn parse(file: &str, text: &str) -> Result<FormatFile, HeaderError> {
        let (lines, doc, body) = split(file, text)?;
        let mut f = FormatFile {
            name: String::new(),
            doc,
            block_len: 0,
            block_bytes: 0,
            class: Class::Block,
            group: 32,
            min: false,
            planes: Vec::new(),
            table: None,
            body,
        };
        for (line, words, _) in &lines {
            let bad = |what: String| HeaderError { file: file.into(), line: *line, what };
            let number = |s: &str| s.parse::<u32>().map_err(|_| bad(format!("{s} is not a number")));
            match &words[..] {
                ["format", name] => f.name = name.to_string(),
                ["block", len, bytes] => (f.block_len, f.block_bytes) = (number(len)?, number(bytes)?),
                ["class", "block"] => f.class = Class::Block,
                ["class", "float"] => f.class = Class::Float,
                ["group", g @ ("16" | "32")] => f.group = number(g)?,
                ["min", m @ ("0" | "1")] => f.min = *m == "1",
                ["plane", bytes] => f.planes.push(number(bytes)?),
                ["table", name] => f.table = Some(name.to_string()),
                _ => return Err(bad(format!("cannot read `{}`", words.join(" ")))),
            }
        }
        let whole = |what: String| Err(HeaderError { file: file.into(), line: 0, what });
        if f.name.is_empty() || f.block_len == 0 {
            return whole("`format NAME` or `block ELEMENTS BYTES` is missing".into());
        }
        if f.planes.is_empty() || f.planes.len() > 4 || f.planes.iter().sum::<u32>() != f.block_bytes {
            return whole(format!("one to four planes must add up to {} bytes a block", f.block_bytes));
        }
        if f.block_len % 32 != 0 {
            return whole("a block must be whole units of 32 elements".into());
        }
        Ok(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: &str = "// y = x.\nkernel copy\nformats none\nconst THREADS = 64\nro x // from\nwo y\nu32 n\nshared f32 part[THREADS]\n---\nKERNEL { }\n";

    #[test]
    fn an_op_header_gives_arguments_in_order_with_their_offsets() {
        let op = OpFile::parse("copy.kc", OP, None).expect("a header");
        assert_eq!((op.name.as_str(), op.doc.as_str(), op.args[0].doc.as_str()), ("copy", "y = x.", "from"));
        assert_eq!(op.layout(), (24, vec![0, 8, 16]));
        assert_eq!(op.shared[0], Shared { ty: "f32".into(), name: "part".into(), size: "THREADS".into() });
    }

    #[test]
    fn a_bad_header_names_the_file_the_line_and_what_is_wrong() {
        for (from, to, line, word) in [
            ("u32 n", "u33 n", 7, "u33"),
            ("formats none", "formats some", 3, "some"),
            ("const THREADS = 64", "const ROWS = 64", 0, "THREADS"),
            ("KERNEL { }", "", 0, "KERNEL"),
            ("\n---\n", "\n", 0, "---"),
        ] {
            let e = OpFile::parse("copy.kc", &OP.replace(from, to), None).expect_err(to);
            assert!(e.file == "copy.kc" && e.line == line && e.what.contains(word), "{e}");
        }
        let e = FormatFile::parse("q.kc", "// Q.\nformat Q\nblock 32 18\nplane 16\n---\n").expect_err("planes");
        assert!(e.what.contains("18 bytes"), "{e}");
    }
}
