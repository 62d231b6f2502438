//! Single-dash names of several letters, as llama.cpp's tools spell them: `-ctk`, `-ub`, `-ngl`, `-ot`.
//!
//! The grammar knows short flags of one letter only, so these are spelled out before it sees them. No meaning enters here.

use std::ffi::OsString;

/// Short and long spelling.
const NAMES: &[(&str, &str)] = &[
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-ub", "--ubatch"),
    ("-ngl", "--n-gpu-layers"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ot", "--override-tensor"),
];

/// The arguments with every name of [`NAMES`] spelled out, up to a `--`.
pub fn spell_out(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut plain = false;
    let spelled = |arg: OsString| {
        let Some(text) = arg.to_str() else { return arg };
        let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
        match (NAMES.iter().find(|(short, _)| *short == name), value) {
            (None, _) => arg,
            (Some((_, long)), None) => OsString::from(long),
            (Some((_, long)), Some(value)) => OsString::from(format!("{long}={value}")),
        }
    };
    let one = |arg: OsString| {
        plain |= arg == "--";
        if plain { arg } else { spelled(arg) }
    };
    args.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_out_with_and_without_a_value_but_not_behind_two_dashes() {
        let out = spell_out(["-ctk", "q8_0", "-ub=64", "-c", "-ngl", "--", "-ctk"].map(OsString::from));
        let expected = ["--cache-type-k", "q8_0", "--ubatch=64", "-c", "--n-gpu-layers", "--", "-ctk"];
        assert_eq!(out, expected.map(OsString::from));
    }
}
