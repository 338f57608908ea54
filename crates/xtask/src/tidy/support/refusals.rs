//! The words in which code refuses: what is given to `unsupported(…)`, `because(…)` and the like,
//! and what the names in there stand for.
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::tidy::mask::{mask, strings};
use crate::tidy::source::code_lines;

/// The calls whose arguments are words of a refusal.
const CALLS: &[&str] = &[
    "unsupported(",
    "because(",
    "unless(",
    "refuse(",
    "mismatch(",
];
/// The errors that are refusals.
const ERRORS: &[&str] = &[
    "Unsupported {",
    "Passing {",
    "Mismatch {",
    "Changed {",
    "InUse {",
];
/// How many names are followed from a refusal to a literal.
const DEPTH: usize = 3;

/// A file's code without its tests.
pub struct Code {
    text: String,
    /// The same without literals and comments.
    masked: String,
    strings: Vec<Range<usize>>,
}

impl Code {
    pub fn new(path: &Path, text: &str) -> Self {
        let masked = mask(text);
        let lines: Vec<&str> = masked.lines().collect();
        let kept = lines[..code_lines(path, &lines)].iter();
        let end = kept.map(|line| line.len() + 1).sum::<usize>();
        let end = end.min(text.len());
        Self {
            masked: masked[..end].to_owned(),
            strings: strings(&text[..end]),
            text: text[..end].to_owned(),
        }
    }

    /// The words and options of all refusals, each with the line where it stands first.
    pub fn refusals(&self) -> BTreeMap<String, usize> {
        let mut found = BTreeMap::new();
        let closures = self.closures();
        for call in CALLS
            .iter()
            .copied()
            .chain(closures.iter().map(|one| &one[..]))
        {
            for at in self.places(call) {
                if !self.masked[..at].ends_with("fn ") {
                    self.collect(self.inside(at + call.len() - 1), 0, &mut found);
                }
            }
        }
        for error in ERRORS {
            for at in self.places(error) {
                let inside = self.inside(at + error.len() - 1);
                // With dots it is a pattern.
                if !self.masked[inside.clone()].contains("..") {
                    self.collect(inside, 0, &mut found);
                }
            }
        }
        found
    }

    /// The closures that refuse, as calls of them begin.
    fn closures(&self) -> Vec<String> {
        let refuses = |range: Range<usize>| {
            let code = &self.masked[range];
            CALLS.iter().chain(ERRORS).any(|words| code.contains(words))
        };
        let all = self.places("let ").into_iter();
        let all = all.filter_map(|at| {
            let (name, rest) = self.masked[at + 4..].split_once(" = ")?;
            let is_closure = rest.starts_with('|') && name.chars().all(is_word);
            let body = at..self.end(at, b';');
            (is_closure && refuses(body)).then(|| format!("{name}("))
        });
        all.collect()
    }

    /// All literals, as [`Self::refusals`] has them.
    pub fn literals(&self) -> impl Iterator<Item = String> + '_ {
        let all = self.strings.iter();
        all.map(|span| words(&self.text[span.clone()]))
    }

    /// Notes the literals in a part of the code, and those that its names stand for.
    fn collect(&self, part: Range<usize>, depth: usize, found: &mut BTreeMap<String, usize>) {
        let inside = |span: &&Range<usize>| part.contains(&span.start);
        for span in self.strings.iter().filter(inside) {
            let words = words(&self.text[span.clone()]);
            if is_told(&words, depth) {
                let line = 1 + self.text[..span.start].matches('\n').count();
                let first = found.entry(words).or_insert(line);
                *first = line.min(*first);
            }
        }
        if depth == DEPTH {
            return;
        }
        for (at, name) in names(&self.masked[part.clone()]) {
            let at = part.start + at;
            let called = self.masked[at + name.len()..].starts_with('(');
            let definition = match called {
                true => self.function(name),
                false => self.binding(name, at).or_else(|| self.constant(name)),
            };
            if let Some(definition) = definition.filter(|one| !one.contains(&part.start)) {
                self.collect(definition, depth + 1, found);
            }
        }
    }

    /// Where `words` stand as words of their own.
    fn places(&self, words: &str) -> Vec<usize> {
        let all = self.masked.match_indices(words).map(|(at, _)| at);
        all.filter(|at| !self.masked[..*at].ends_with(is_word))
            .collect()
    }

    /// What stands between the bracket at `open` and the one that closes it.
    fn inside(&self, open: usize) -> Range<usize> {
        let mut depth = 0usize;
        for (at, byte) in self.masked.bytes().enumerate().skip(open) {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return open + 1..at;
            }
        }
        open + 1..self.masked.len()
    }

    /// What the last `let` before `at`, in the same function, gives to `name`.
    fn binding(&self, name: &str, at: usize) -> Option<Range<usize>> {
        let function = self.masked[..at].rfind("fn ")?;
        let all = self.masked[function..at].rmatch_indices("let ");
        for (start, _) in all {
            let start = function + start;
            let equals = start + self.masked[start..].find(" =")?;
            let pattern = &self.masked[start..equals];
            // The type of what is bound is no part of it.
            let pattern = pattern.split(": ").next().unwrap_or(pattern);
            if names(pattern).any(|(_, one)| one == name) {
                let condition = self.masked[..start].ends_with("if ");
                return Some(equals..self.end(equals, if condition { b'{' } else { b';' }));
            }
        }
        None
    }

    fn constant(&self, name: &str) -> Option<Range<usize>> {
        let declared = ["const ", "static "].map(|word| format!("{word}{name}: "));
        let mut all = declared.iter().flat_map(|one| self.places(one));
        all.next().map(|at| at..self.end(at, b';'))
    }

    /// The body of a function that gives words.
    fn function(&self, name: &str) -> Option<Range<usize>> {
        let at = *self.places(&format!("fn {name}(")).first()?;
        let body = at + self.masked[at..].find('{')?;
        let gives = self.masked[at..body].contains("&'static str");
        gives.then(|| self.inside(body))
    }

    /// Where the first `end` outside of brackets stands.
    fn end(&self, start: usize, end: u8) -> usize {
        let mut depth = 0usize;
        for (at, byte) in self.masked.bytes().enumerate().skip(start) {
            match byte {
                byte if byte == end && depth == 0 => return at,
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        self.masked.len()
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The names in code that are no fields or methods of something.
fn names(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + code[at..].find(is_word)?;
        let rest = &code[start..];
        let name = &rest[..rest.find(|one| !is_word(one)).unwrap_or(rest.len())];
        at = start + name.len();
        Some((start, name))
    })
    .filter(|(start, _)| !code[..*start].ends_with('.'))
}

/// A literal as it is told: each `{…}` of a format is only dots, and what goes on in the next line
/// stands in one.
fn words(literal: &str) -> String {
    let inner = literal.trim_matches('"');
    let mut words = String::new();
    let mut rest = inner;
    while let Some(at) = rest.find(['{', '\\']) {
        words.push_str(&rest[..at]);
        let tail = &rest[at..];
        rest = if let Some(tail) = tail.strip_prefix("\\\n") {
            tail.trim_start()
        } else if tail.starts_with('\\') {
            words.push_str(tail.get(1..2).unwrap_or_default());
            tail.get(2..).unwrap_or_default()
        } else {
            if !words.ends_with('…') {
                words.push('…');
            }
            tail.split_once('}').map_or("", |(_, tail)| tail)
        };
    }
    words.push_str(rest);
    words.trim_end_matches(',').to_owned()
}

/// Tells whether a literal says something, and is not only to put others together. One word alone
/// does where it stands in the call itself: elsewhere it may be what something is compared with.
fn is_told(words: &str, depth: usize) -> bool {
    let letters = |word: &str| word.chars().filter(|one| one.is_alphabetic()).count();
    let alone = words.split(' ').filter(|word| letters(word) > 0).count() < 2;
    let says = words.split(' ').any(|word| letters(word) > 2);
    words.starts_with("--") || (says && !(alone && depth > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(code: &str) -> Vec<String> {
        let code = Code::new(Path::new("crates/a/src/a.rs"), code);
        code.refusals().into_keys().collect()
    }

    #[test]
    fn words_of_a_call_and_what_its_names_stand_for() {
        let code = r#"
            const OPTION: &str = "--more";
            fn a(open: &Open) -> Error {
                let place = format!("fd {}", open.fd);
                let other = "not this one";
                log::debug!("nor this one");
                let why = match open.fd {
                    0 => format!("it was {place} of \
                                  {other}"),
                    _ => hinders(open),
                };
                open.unsupported(&why, Some(OPTION))
            }
            fn hinders(open: &Open) -> &'static str { "it is full" }
            fn b() -> Error {
                let what = match kind { "net" => "a pipe", _ => "a" };
                Error::unsupported(1, what).because("it (is) old,")?;
                let with = |what: &str| Error::unsupported(1, what);
                with("sockets")
            }
        "#;
        let tests = "#[cfg(test)]\nmod tests { fn c() { unsupported(\"no test is read\") } }\n";
        let want = [
            "--more",
            "a pipe",
            "it (is) old",
            "it is full",
            "it was … of …",
            "sockets",
        ];
        assert_eq!(found(&format!("{code}\n{tests}")), want);
    }

    #[test]
    fn errors_and_constants() {
        let code = r#"
            static WHY: &[(&[u8], &str)] = &[(b"a b c", "it is locked")];
            fn a() {
                if let Some((_, why)) = WHY.iter().next() { refuse(*why); }
                Error::Passing { what: format!("{place}: it waits"), allow: None }
            }
            fn b() { if let Unsupported { what, .. } = error("not this one") {} }
        "#;
        assert_eq!(found(code), ["it is locked", "…: it waits"]);
    }

    #[test]
    fn lines_are_those_of_the_literal() {
        let code = "fn a() {\n    let why = \"it is\n";
        let code = format!("{code}full\";\n    b.unsupported(why)\n}}\n");
        let code = Code::new(Path::new("crates/a/src/a.rs"), &code);
        let found: Vec<_> = code.refusals().into_iter().collect();
        assert_eq!(found, [("it is\nfull".to_owned(), 2)]);
    }
}
