//! Functions that take a tuple: it wants a type with names for its parts.

use std::path::{Path, PathBuf};

use super::mask::mask;
use super::source::{code_lines, crate_name};
use super::violation::Violation;

/// Functions in the code of `files` that are of crate `of`, and have a tuple as a parameter.
pub fn takers(of: &str, files: &[(PathBuf, String)]) -> Vec<Violation> {
    let own = files.iter().filter(|(path, _)| crate_name(path) == of);
    own.flat_map(|(path, text)| of_file(path, text)).collect()
}

fn of_file(path: &Path, text: &str) -> Vec<Violation> {
    let masked = mask(text);
    let lines: Vec<&str> = masked.lines().collect();
    let code = lines[..code_lines(path, &lines)].join("\n");
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        if code[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_') {
            continue;
        }
        let (name, rest) = named(&code[at + 3..]);
        if !name.is_empty() && parameters(rest).iter().any(|parameter| is_tuple(parameter)) {
            let line = code[..at].matches('\n').count() + 1;
            let rule = format!("`{name}` takes a tuple: give it a type");
            found.push(Violation::new(path, line, rule));
        }
    }
    found
}

/// The name at the start of a text, and what follows.
fn named(text: &str) -> (&str, &str) {
    let end = text.find(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
    text.split_at(end.unwrap_or(text.len()))
}

/// The parameters of a function, given from the end of its name on.
fn parameters(text: &str) -> Vec<&str> {
    let Some(start) = list_start(text) else {
        return Vec::new();
    };
    let (mut depth, mut from, mut found) = (0usize, start + 1, Vec::new());
    for (at, letter) in text.char_indices().skip_while(|(at, _)| *at < start) {
        match letter {
            '(' | '[' | '<' | '{' => depth += 1,
            // The arrow of a closure's type closes nothing.
            '>' if text[..at].ends_with('-') => {}
            ')' | ']' | '>' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || (depth == 1 && letter == ',') {
            found.push(&text[from..at]);
            from = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    found
}

/// Where the parameters begin, behind those of types.
fn list_start(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, letter) in text.char_indices() {
        match letter {
            '<' => depth += 1,
            '>' if !text[..at].ends_with('-') => depth = depth.checked_sub(1)?,
            '(' if depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

/// Tells whether a parameter's type is a tuple, or a reference to one.
fn is_tuple(parameter: &str) -> bool {
    let Some((_, kind)) = parameter.rsplit_once(": ") else {
        return false;
    };
    let kind = kind.trim_start_matches('&').trim_start();
    let kind = match kind.strip_prefix('\'') {
        Some(lifetime) => lifetime.split_once(' ').map_or("", |(_, kind)| kind),
        None => kind,
    };
    let kind = kind.trim_start_matches("mut ");
    // A trait object has parentheses as well, and nothing but itself between them.
    kind.starts_with('(') && parameters(kind).len() > 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuples_among_parameters_are_found() {
        let text = "//! a\nfn a((b, c): (u8, &[u8]), d: u8) {}\n\
                    fn e<F: Fn((u8, u8)) -> u8>(f: F) {}\n\
                    fn g(h: &'a mut (u8, u8)) {}\n\
                    fn i(j: Option<(u8, u8)>, k: impl Fn(u8) -> u8) {}\n\
                    fn l(&self, m: (), n: &(dyn Fn(u8, u8) + Sync)) -> (u8, u8) {}\nfn n(\n    o: u8,\n    p: (u8, u8),\n) {}\n\
                    #[cfg(test)]\nmod tests { fn q(r: (u8, u8)) {} }\n";
        let files = [(PathBuf::from("crates/vm/src/a.rs"), text.to_owned())];
        let lines: Vec<_> = takers("vm", &files).iter().map(|one| one.line).collect();
        assert_eq!(lines, [2, 4, 7]);
        assert_eq!(takers("sys", &files), []);
    }
}
