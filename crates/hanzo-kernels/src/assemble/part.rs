//! Parts: text that several ops share (`ops/parts/*.kc`), spliced into an op's file before it is parsed. What a part says may
//! not enter here.

use super::HeaderError;

/// `text`, an op's file, with every `part NAME` of its header and `PART(NAME)` of its body replaced by what `parts` (names and texts)
/// have. A part is a comment and header lines, `---`, functions, `---`, statements. Line numbers then count the whole text.
///
/// # Errors
/// A part that is not there or has no three sections; one that the body uses and the header does not name.
pub fn expand(file: &str, text: &str, parts: &[(String, String)]) -> Result<String, HeaderError> {
    let Some((header, body)) = text.split_once("\n---\n") else { return Ok(text.to_string()) };
    let (mut head, mut functions, mut body) = (String::new(), String::new(), body.to_string());
    for (i, line) in header.lines().enumerate() {
        let bad = |what: String| HeaderError { file: file.into(), line: i + 1, what };
        let name = match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["part", name] => name,
            _ => {
                head.push_str(line);
                head.push('\n');
                continue;
            }
        };
        let part = parts.iter().find(|p| p.0 == name).ok_or_else(|| bad(format!("there is no part {name}")))?;
        let sections: Vec<&str> = part.1.split("---\n").collect();
        let [declared, own, statements] = sections[..] else {
            return Err(bad(format!("the part {name} is not declarations, functions and statements")));
        };
        head.extend(declared.lines().filter(|l| !l.starts_with("//")).map(|l| format!("{l}\n")));
        functions.push_str(own);
        functions.push('\n');
        body = body.replace(&format!("PART({name})\n"), statements);
    }
    if let Some(rest) = body.split_once("PART(").map(|(_, rest)| rest.split(')').next().unwrap_or_default()) {
        let what = format!("the body uses the part {rest}, which the header does not name");
        return Err(HeaderError { file: file.into(), line: 0, what });
    }
    Ok(format!("{head}---\n{functions}{body}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: &str = "// Doc.\nkernel k\npart p\nu32 n\n---\nKERNEL {\n  PART(p)\n}\n";

    fn parts() -> Vec<(String, String)> {
        vec![("p".into(), "// Why.\nshared f32 t[4]\n---\nFN u32 f() { return 1u; }\n---\nt[0] = 1.0f;\n".into())]
    }

    #[test]
    fn a_part_gives_declarations_functions_and_statements_to_their_places() {
        let whole = expand("k.kc", OP, &parts()).expect("it expands");
        let want = "// Doc.\nkernel k\nshared f32 t[4]\nu32 n\n---\nFN u32 f() { return 1u; }\n\nKERNEL {\n  t[0] = 1.0f;\n}\n";
        assert_eq!(whole, want);
        assert_eq!(expand("k.kc", &want.replace("PART", ""), &[]).expect("nothing to do"), want);
    }

    #[test]
    fn a_part_that_is_missing_or_not_named_is_an_error() {
        let e = expand("k.kc", OP, &[]).expect_err("no such part");
        assert!(e.line == 3 && e.what.contains("part p"), "{e}");
        let e = expand("k.kc", &OP.replace("part p\n", ""), &parts()).expect_err("not named");
        assert!(e.what.contains("part p"), "{e}");
        let broken = vec![("p".to_string(), "// Why.\n---\n".to_string())];
        assert!(expand("k.kc", OP, &broken).is_err());
    }
}
