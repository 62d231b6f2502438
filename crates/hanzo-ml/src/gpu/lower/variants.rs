//! The table of kernel variants: which kernel serves which op, format and number of tokens.
