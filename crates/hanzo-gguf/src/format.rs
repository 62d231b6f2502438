//! The table of tensor formats: one row a format, nothing else lives here.
//!
//! A format is how bits become a float: `block_len` elements are packed into `block_bytes` bytes.
//! The ids are GGUF's tensor type ids. Adding a format adds one row here, one file under `formats/`
//! (to and from float), and one file in each backend that runs it. The row names the file: `formats/mod.rs` declares
//! its modules from this table.

/// Calls the macro `$callback` with every row of the table.
///
/// `plain` rows are numbers stored one by one: `Name, id, bytes, "NAME"`; their code is in `formats/plain.rs`.
/// `blocks` rows are packed: `Name, id, elements in a block, bytes of a block, "NAME", module under formats/`.
macro_rules! for_each_format {
    ($callback:ident) => {
        $callback! {
            plain {
                F32, 0, 4, "F32";
                F16, 1, 2, "F16";
                I8, 24, 1, "I8";
                I16, 25, 2, "I16";
                I32, 26, 4, "I32";
                I64, 27, 8, "I64";
                F64, 28, 8, "F64";
                BF16, 30, 2, "BF16";
            }
            blocks {
                Q4_0, 2, 32, 18, "Q4_0", q4_0;
                Q4_1, 3, 32, 20, "Q4_1", q4_1;
                Q5_0, 6, 32, 22, "Q5_0", q5_0;
                Q5_1, 7, 32, 24, "Q5_1", q5_1;
                Q8_0, 8, 32, 34, "Q8_0", q8_0;
                Q2_K, 10, 256, 84, "Q2_K", q2_k;
                Q3_K, 11, 256, 110, "Q3_K", q3_k;
                Q4_K, 12, 256, 144, "Q4_K", q4_k;
                Q5_K, 13, 256, 176, "Q5_K", q5_k;
                Q6_K, 14, 256, 210, "Q6_K", q6_k;
                IQ2_XXS, 16, 256, 66, "IQ2_XXS", iq2_xxs;
                IQ2_XS, 17, 256, 74, "IQ2_XS", iq2_xs;
                IQ3_XXS, 18, 256, 98, "IQ3_XXS", iq3_xxs;
                IQ1_S, 19, 256, 50, "IQ1_S", iq1_s;
                IQ4_NL, 20, 32, 18, "IQ4_NL", iq4_nl;
                IQ3_S, 21, 256, 110, "IQ3_S", iq3_s;
                IQ2_S, 22, 256, 82, "IQ2_S", iq2_s;
                IQ4_XS, 23, 256, 136, "IQ4_XS", iq4_xs;
                IQ1_M, 29, 256, 56, "IQ1_M", iq1_m;
                TQ1_0, 34, 256, 54, "TQ1_0", tq1_0;
                TQ2_0, 35, 256, 66, "TQ2_0", tq2_0;
                MXFP4, 39, 32, 17, "MXFP4", mxfp4;
                NVFP4, 40, 64, 36, "NVFP4", nvfp4;
                Q1_0, 41, 128, 18, "Q1_0", q1_0;
                Q2_0, 42, 64, 18, "Q2_0", q2_0;
                #[cfg(feature = "synthetic-format")]
                X26_TEST, 0xF026, 32, 13, "X26_TEST", x26;
            }
        }
    };
}

pub(crate) use for_each_format;

macro_rules! define_format {
    (
        plain { $( $plain:ident, $plain_id:literal, $plain_bytes:literal, $plain_name:literal; )* }
        blocks { $(
            $( #[$attr:meta] )*
            $block:ident, $id:literal, $len:literal, $bytes:literal, $name:literal, $module:ident;
        )* }
    ) => {
        /// A tensor format, by its GGUF name.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Format {
            $(
                #[doc = concat!("GGUF type ", $plain_id, ": a number of ", $plain_bytes, " bytes.")]
                $plain,
            )*
            $(
                $( #[$attr] )*
                #[doc = concat!("GGUF type ", $id, ": ", $len, " elements in ", $bytes, " bytes.")]
                $block,
            )*
        }

        impl Format {
            /// Every format this build knows: the plain numbers, then the block formats, each in the order of their ids.
            pub const ALL: &'static [Format] = &[
                $( Format::$plain, )*
                $( $( #[$attr] )* Format::$block, )*
            ];

            /// The GGUF type id, as stored in a tensor's header.
            pub const fn id(self) -> u32 {
                match self {
                    $( Format::$plain => $plain_id, )*
                    $( $( #[$attr] )* Format::$block => $id, )*
                }
            }

            /// The format of a GGUF type id, if known.
            pub const fn from_id(id: u32) -> Option<Format> {
                match id {
                    $( $plain_id => Some(Format::$plain), )*
                    $( $( #[$attr] )* $id => Some(Format::$block), )*
                    _ => None,
                }
            }

            /// Elements in one block (1 for plain types).
            pub const fn block_len(self) -> usize {
                match self {
                    $( Format::$plain => 1, )*
                    $( $( #[$attr] )* Format::$block => $len, )*
                }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $( Format::$plain => $plain_bytes, )*
                    $( $( #[$attr] )* Format::$block => $bytes, )*
                }
            }

            /// The format's name as the field writes it, e.g. `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Format::$plain => $plain_name, )*
                    $( $( #[$attr] )* Format::$block => $name, )*
                }
            }
        }
    };
}

for_each_format!(define_format);

impl Format {
    /// The format of a name such as `Q4_K` (ASCII case ignored).
    pub fn from_name(name: &str) -> Option<Format> {
        Self::ALL.iter().copied().find(|f| f.name().eq_ignore_ascii_case(name))
    }

    /// True for the packed block formats (everything but plain floats and integers).
    pub const fn is_block(self) -> bool {
        self.block_len() > 1
    }

    /// True for formats that hold a weight a contraction can read: the block formats, F32, F16 and BF16.
    pub const fn is_weight(self) -> bool {
        self.is_block() || matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Bytes of a row of `n` elements, or `None` if `n` is not a whole number of blocks or the size overflows.
    pub const fn row_bytes(self, n: usize) -> Option<usize> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
