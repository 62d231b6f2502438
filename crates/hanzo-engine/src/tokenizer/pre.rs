//! Pre-tokenizers: how a text is cut into words before byte pairs are merged inside each word.
//!
//! A pre-tokenizer is a short list of steps. Each step cuts every piece that the step before left: what it matches
//! becomes a piece, and so does what lies between two matches. The patterns are those of the models' own
//! `tokenizer.json` files; `tokenizer.ggml.pre` names one of them.
//!
//! Most end in `\s+(?!\S)|\s+`: a run of white space gives its last character to the word behind it. That is the only
//! look-ahead in use here, so [`Step::Words`] does it by hand, and a linear-time automaton does the rest: no input,
//! however hostile, makes it backtrack. Nothing about vocabularies or ids may enter.

use std::sync::LazyLock;

use regex_automata::Input;
use regex_automata::meta::Regex;

/// What a pre-tokenizer's name implies.
pub(super) struct Pre {
    /// Names in `tokenizer.ggml.pre` that select this entry.
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A word that is a token as a whole is taken as it is, even where the merges would not build it.
    pub ignore_merges: bool,
    /// Whether BOS is added when `tokenizer.ggml.add_bos_token` is absent.
    pub add_bos: bool,
}

/// One cut.
enum Step {
    /// Every match is a piece, every gap is a piece.
    Isolate(&'static str),
    /// The alternatives of a word, followed (implied) by `\s+(?!\S)|\s+`.
    Words(&'static str),
}

use Step::{Isolate, Words};

impl Pre {
    /// The entry's own copy of `name`, or its first name.
    pub(super) fn name(&self, name: &str) -> &'static str {
        self.names.iter().find(|&&own| own == name).unwrap_or(&self.names[0])
    }
}

const GPT2: Step = Words(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+");

const LLAMA3: Step = Words(concat!(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
));

const QWEN2: Step = Words(concat!(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
));

/// Letters, then three digits, punctuation, and line ends: DeepSeek V3 and its descendants.
const DEEPSEEK3: &[Step] = &[
    Isolate(r"\p{N}{1,3}"),
    Isolate("[一-龥぀-ゟ゠-ヿ]+"),
    Words(concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+",
    )),
];

/// The cased letters DeepSeek's first tokenizer knows: an explicit list, older than today's Unicode. (Escaped: some of
/// them, like the Kelvin sign, do not survive an editor that normalizes.)
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);

const CJK: Step = Isolate(r"[一-龥ࠀ-一가-\x{D7FF}]+");

const BLOOM: Step = Isolate(r" ?[^(\s|.,!?…。，、।۔،)]+");

/// A word of mixed case splits where lower case is followed by upper case.
const TEKKEN: Step = Words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
));

const GPT4O: Step = Words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
));

const fn plain(names: &'static [&'static str], steps: &'static [Step]) -> Pre {
    Pre { names, steps, ignore_merges: false, add_bos: false }
}

/// Every pre-tokenizer this engine knows. The first is the fallback.
pub(super) static TABLE: &[Pre] = &[
    plain(&["default"], &[Isolate(r"[\p{P}$+<=>^~|]+"), GPT2, Isolate(r"\p{N}+"), Isolate("[0-9][0-9][0-9]")]),
    plain(
        &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
        ],
        &[GPT2],
    ),
    Pre {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        steps: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Pre { names: &["glm4", "glm5"], steps: &[LLAMA3], ignore_merges: true, add_bos: false },
    plain(
        &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez", "kormo", "f2llmv2", "grok-2"],
        &[QWEN2],
    ),
    plain(
        &["qwen35"],
        &[Words(concat!(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+",
        ))],
    ),
    plain(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[Isolate(r"\p{N}"), GPT2],
    ),
    plain(
        &["deepseek-llm"],
        &[
            Isolate(r"[\r\n]"),
            Isolate(DEEPSEEK_LETTERS),
            Isolate(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Isolate(r"\s+$"),
            CJK,
            Isolate(r"\p{N}+"),
        ],
    ),
    plain(
        &["deepseek-coder"],
        &[Isolate(r"[\r\n]"), Isolate(r"\s?\p{L}+"), Isolate(r"\s?\p{P}+"), CJK, Isolate(r"\p{N}")],
    ),
    plain(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], DEEPSEEK3),
    plain(&["falcon"], &[Isolate(r"[\p{P}$+<=>^~|`]+"), GPT2, Isolate("[0-9][0-9][0-9]")]),
    plain(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    plain(&["viking"], &[BLOOM, Isolate(r"\p{N}")]),
    Pre { names: &["tekken"], steps: &[TEKKEN], ignore_merges: true, add_bos: true },
    plain(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    plain(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[Words(concat!(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]",
        ))],
    ),
    plain(
        &["seed-coder"],
        &[Words(concat!(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+",
        ))],
    ),
    plain(&["ufakzeka"], &[Words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+")]),
    plain(&["laguna"], &[Isolate(r"[^\n]+|\n+"), QWEN2]),
    Pre {
        names: &["minicpm5"],
        steps: &[
            Isolate(r"\p{N}{1,3}"),
            Words(concat!(
                r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+",
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            )),
        ],
        ignore_merges: true,
        add_bos: false,
    },
    plain(
        &["exaone-moe"],
        &[Words(concat!(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]",
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]",
        ))],
    ),
];

/// The name of the entry used where a model names none, or one that is unknown.
pub(super) const DEFAULT: &str = TABLE[0].names[0];

/// The entry called `name`, if there is one.
pub(super) fn find(name: &str) -> Option<&'static Pre> {
    TABLE.iter().find(|pre| pre.names.contains(&name))
}

/// Every name that [`find`] knows, in table order.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|pre| pre.names.iter().copied())
}

/// A compiled pre-tokenizer.
pub(super) struct Splitter {
    steps: Vec<Compiled>,
}

struct Compiled {
    regex: Regex,
    /// Pattern number 1 of `regex` is the implied run of white space.
    trailing_space: bool,
}

impl Splitter {
    /// Compiles the steps of `pre`.
    ///
    /// # Panics
    /// Never: the patterns are constants, and a test compiles each of them.
    pub(super) fn new(pre: &Pre) -> Splitter {
        let compile = |step: &Step| match step {
            Isolate(pattern) => (Regex::new(pattern), false),
            Words(head) => (Regex::new_many(&[*head, r"\s+"]), true),
        };
        let steps = pre
            .steps
            .iter()
            .map(|step| {
                let (regex, trailing_space) = compile(step);
                Compiled { regex: regex.expect("a pattern of the table does not compile"), trailing_space }
            })
            .collect();
        Splitter { steps }
    }

    /// Cuts `text`, calling `word` with each piece in order. The pieces concatenate to `text`; none is empty.
    pub(super) fn split<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) {
        apply(&self.steps, text, word);
    }
}

fn apply<'t>(steps: &[Compiled], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    let Some((step, rest)) = steps.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let mut done = 0; // text[..done] has been handed on
    let mut input = Input::new(text);
    while let Some(found) = step.regex.search(&input) {
        let mut end = found.end();
        if step.trailing_space && found.pattern().as_usize() == 1 && end < text.len() {
            // `\s+(?!\S)|\s+`: unless it is alone, the last white space belongs to the word behind.
            let run = &text[found.start()..end];
            let last = run.chars().next_back().map_or(0, char::len_utf8);
            if last < run.len() {
                end -= last;
            }
        }
        if end == found.start() {
            break; // no pattern of the table matches the empty string
        }
        apply(rest, &text[done..found.start()], word);
        apply(rest, &text[found.start()..end], word);
        done = end;
        input.set_start(end);
    }
    apply(rest, &text[done..], word);
}

/// Byte-level byte pair encoding writes bytes as printable characters: the printable ones of Latin-1 stand for
/// themselves, the others follow from U+0100 on, in order of their value (GPT-2).
pub(super) static BYTE_TO_CHAR: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let byte = byte as u32;
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
});

/// The inverse of [`BYTE_TO_CHAR`], for code points below its length; 0xFFFF marks a character that is no byte.
static CHAR_TO_BYTE: LazyLock<[u16; 0x144]> = LazyLock::new(|| {
    let mut inverse = [0xFFFF; 0x144];
    for (byte, &char) in BYTE_TO_CHAR.iter().enumerate() {
        inverse[char as usize] = byte as u16;
    }
    inverse
});

/// Appends the bytes that `text` stands for in the byte-level alphabet; false (and `out` as it was) if some character is
/// not of that alphabet.
pub(super) fn decode_byte_level(text: &str, out: &mut Vec<u8>) -> bool {
    let table = &*CHAR_TO_BYTE;
    let start = out.len();
    for char in text.chars() {
        match table.get(char as usize) {
            Some(&byte) if byte != 0xFFFF => out.push(byte as u8),
            _ => {
                out.truncate(start);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(name: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        Splitter::new(find(name).expect("known")).split(text, &mut |word| words.push(word.to_owned()));
        words
    }

    #[test]
    fn every_pattern_compiles_and_no_name_is_listed_twice() {
        for pre in TABLE {
            let _ = Splitter::new(pre);
        }
        let mut all: Vec<_> = names().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_pieces_concatenate_to_the_text() {
        let text = "  Hé's 12345\r\n\r\n x\u{a0}\u{3000}y 漢字カナ 👩‍👩‍👧!!\t\t\tz'LL...\n  ";
        for name in names() {
            assert_eq!(split(name, text).concat(), text, "{name}");
            assert!(split(name, text).iter().all(|word| !word.is_empty()), "{name}");
        }
    }

    #[test]
    fn a_run_of_spaces_gives_its_last_one_to_the_word_behind() {
        assert_eq!(split("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(split("gpt-2", "a\nb\n\nc"), ["a", "\n", "b", "\n", "\n", "c"]);
        assert_eq!(split("qwen2", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(split("llama-bpe", "\u{3000}\u{3000}x"), ["\u{3000}", "\u{3000}x"]);
    }

    #[test]
    fn digits_group_as_the_model_was_trained() {
        assert_eq!(split("llama-bpe", "12345"), ["123", "45"]);
        assert_eq!(split("qwen2", "123"), ["1", "2", "3"]);
        assert_eq!(split("smollm", " 12"), [" ", "1", "2"]);
        assert_eq!(split("gpt-2", " 123"), [" 123"]);
        assert_eq!(split("default", "1234567"), ["123", "456", "7"]);
    }

    #[test]
    fn contractions_split_off_in_the_cases_each_model_knows() {
        assert_eq!(split("llama-bpe", "I'LL don't"), ["I", "'LL", " don", "'t"]);
        assert_eq!(split("gpt-2", "I'LL"), ["I", "'", "LL"]);
        assert_eq!(split("gpt-4o", "DON'T camelCase"), ["DON'T", " camel", "Case"]);
    }

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        for byte in 0..=255u8 {
            let mut out = Vec::new();
            assert!(decode_byte_level(&BYTE_TO_CHAR[byte as usize].to_string(), &mut out));
            assert_eq!(out, [byte]);
        }
        assert_eq!(BYTE_TO_CHAR[b' ' as usize], 'Ġ');
        assert!(!decode_byte_level("a｜b", &mut Vec::new()));
    }
}
