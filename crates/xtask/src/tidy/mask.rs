//! Blanks comments and literals out of Rust source, so that what remains can be searched as text.

use std::ops::Range;

/// Returns `text` with every byte of a comment, string or character literal made a space; lines and
/// columns of the rest stay where they were.
pub fn mask(text: &str) -> String {
    let mut out = text.as_bytes().to_vec();
    for span in spans(text) {
        for byte in &mut out[span] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Returns where the string literals of `text` stand, with their quotation marks: no raw ones, none
/// of bytes.
pub fn strings(text: &str) -> Vec<Range<usize>> {
    let of_bytes = |at: usize| text[..at].ends_with(['b', 'c']);
    let is_string = |at: usize| text.as_bytes()[at] == b'"' && !of_bytes(at);
    let all = spans(text).into_iter();
    all.filter(|span| is_string(span.start)).collect()
}

/// Returns where comments and literals stand.
fn spans(text: &str) -> Vec<Range<usize>> {
    let bytes = text.as_bytes();
    let mut spans = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if !follows_word(bytes, at) => raw_string_end(bytes, at),
            b'\'' => character_end(text, at),
            _ => at,
        };
        let end = end.min(bytes.len());
        if end > at {
            spans.push(at..end);
        }
        at = end.max(at + 1);
    }
    spans
}

/// Tells whether a word ends right before `at`: there `r` begins no raw string, but in `br` it
/// does.
fn follows_word(bytes: &[u8], at: usize) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match at.checked_sub(1).map(|before| bytes[before]) {
        Some(b'b' | b'c') => at >= 2 && word(bytes[at - 2]),
        Some(byte) => word(byte),
        None => false,
    }
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    let length = bytes[at..].iter().position(|byte| *byte == b'\n');
    length.map_or(bytes.len(), |length| at + length)
}

fn comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0usize;
    let mut at = start;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns `start` where no raw string begins there.
fn raw_string_end(bytes: &[u8], start: usize) -> usize {
    let hashes = bytes[start + 1..]
        .iter()
        .take_while(|byte| **byte == b'#')
        .count();
    if bytes.get(start + 1 + hashes) != Some(&b'"') {
        return start;
    }
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    let body = start + 2 + hashes;
    let length = bytes[body..]
        .windows(close.len())
        .position(|window| window == close);
    length.map_or(bytes.len(), |length| body + length + close.len())
}

/// Returns `start` for a lifetime.
fn character_end(text: &str, start: usize) -> usize {
    let mut characters = text[start + 1..].char_indices();
    match characters.next() {
        Some((_, '\\')) => {
            // What is escaped may itself be a quote.
            let rest = text.get(start + 3..).unwrap_or_default();
            rest.find('\'')
                .map_or(text.len(), |length| start + 3 + length + 1)
        }
        Some(_) => match characters.next() {
            Some((offset, '\'')) => start + 1 + offset + 1,
            _ => start,
        },
        None => start,
    }
}

#[cfg(test)]
mod tests {
    use super::{mask, strings};

    #[test]
    fn only_code_remains() {
        let cases = [
            ("a // unsafe\nb", "a          \nb"),
            ("a /* x /* y */ z */ b", "a                   b"),
            (r#"f("unsafe \" {") }"#, r"f(             ) }"),
            (r###"f(r#"a " b"#, br"c")"###, "f(          , b    )"),
            (
                "let c = '{'; fn f<'a>(x: &'a str)",
                "let c =    ; fn f<'a>(x: &'a str)",
            ),
            (r"('\'', '\u{7b}')", "(    ,         )"),
            ("for r in var", "for r in var"),
        ];
        for (text, want) in cases {
            assert_eq!(mask(text), want, "{text}");
        }
    }

    #[test]
    fn strings_are_found() {
        let text = r##"f("a \" b", b"c", 'd', r#"e"#) // "f""##;
        let found: Vec<_> = strings(text).into_iter().map(|span| &text[span]).collect();
        assert_eq!(found, [r#""a \" b""#]);
    }

    #[test]
    fn what_never_ends_is_blanked_to_the_end() {
        for text in ["\"abc", "/* abc", "r#\"abc", "'\\", "'", "r", "\"\\"] {
            assert_eq!(mask(text).len(), text.len(), "{text}");
        }
    }
}
