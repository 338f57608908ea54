//! Files of a crate that import each other in a circle: none of them can be understood alone.
//!
//! An edge is a path in code (`use crate::a::B`, `super::C`, `a::f()`) to what another file has,
//! followed through `pub use`. A file that only names its own modules for others (`mod a;`,
//! `pub use a::B;`) does not import them.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use super::mask::mask;
use super::source::code_lines;
use super::violation::Violation;

/// A module by its path in the crate; the crate's root has none.
type Module = Vec<String>;

/// One crate's files.
#[derive(Default)]
struct Files {
    files: BTreeMap<Module, (PathBuf, String)>,
    /// What a module names for others: the module, the name, and the path that it stands for.
    named: BTreeMap<(Module, String), Module>,
}

/// A path that a file names.
struct NamedPath {
    segments: Vec<String>,
    alias: Option<String>,
    public: bool,
}

/// The circles of a crate, given the `files` with their text.
pub fn of_crate(name: &str, files: &[(PathBuf, String)]) -> Vec<Violation> {
    let folder = Path::new("crates").join(name).join("src");
    let own = files.iter().filter(|(path, _)| path.starts_with(&folder));
    circles(&Files::new(&folder, own))
}

impl Files {
    fn new<'a>(folder: &Path, files: impl Iterator<Item = &'a (PathBuf, String)>) -> Self {
        let mut own = Self::default();
        for (path, text) in files {
            let masked = mask(text);
            let lines: Vec<&str> = masked.lines().collect();
            let code = lines[..code_lines(path, &lines)].join("\n");
            let within = path.strip_prefix(folder).unwrap_or(path).with_extension("");
            let mut module: Module = within
                .iter()
                .map(|part| part.to_string_lossy().into_owned())
                .collect();
            let last = module.last().map(String::as_str);
            if matches!(last, Some("lib" | "main" | "mod")) {
                module.pop();
            }
            own.files.insert(module, (path.clone(), code));
        }
        let modules: Vec<Module> = own.files.keys().cloned().collect();
        for module in modules {
            for one in uses(&own.files[&module].1).iter().filter(|one| one.public) {
                if let (Some(path), Some(name)) =
                    (own.absolute(&module, &one.segments), one.segments.last())
                {
                    let name = one.alias.as_ref().unwrap_or(name).clone();
                    own.named.insert((module.clone(), name), path);
                }
            }
        }
        own
    }

    /// A path from the crate's root on; none for other crates' and for what a file has itself.
    fn absolute(&self, module: &[String], segments: &[String]) -> Option<Module> {
        let supers = segments.iter().take_while(|one| *one == "super").count();
        let (mut base, rest) = match segments.first()?.as_str() {
            "crate" => (Vec::new(), &segments[1..]),
            "self" => (module.to_vec(), &segments[1..]),
            "super" => {
                let up = module.len().checked_sub(supers)?;
                (module[..up].to_vec(), &segments[supers..])
            }
            first => {
                let child = [module, &[first.to_owned()]].concat();
                if !self.files.contains_key(&child) {
                    return None;
                }
                (module.to_vec(), segments)
            }
        };
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The file that has what a path names.
    fn resolve(&self, path: &[String], depth: usize) -> Option<&Module> {
        let base = (0..=path.len())
            .rev()
            .find_map(|len| Some((len, self.files.get_key_value(&path[..len])?.0)));
        let (len, base) = base?;
        let again = path.get(len).and_then(|name| {
            let stands_for = self.named.get(&(base.clone(), name.clone()))?;
            let path = [stands_for, &path[len + 1..]].concat();
            (depth < 8)
                .then(|| self.resolve(&path, depth + 1))
                .flatten()
        });
        again.or(Some(base))
    }

    /// The files that a module's file imports.
    fn imports(&self, module: &Module) -> BTreeSet<&Module> {
        let code = &self.files[module].1;
        let mut found = BTreeSet::new();
        let own_name = |one: &NamedPath, path: &Module| {
            one.public && path.starts_with(module) && path.len() > module.len()
        };
        let named = uses(code).into_iter().chain(mentions(code));
        for one in named {
            let path = self.absolute(module, &one.segments);
            let path = path.filter(|path| !own_name(&one, path));
            let target = path.and_then(|path| self.resolve(&path, 0));
            found.extend(target.filter(|target| *target != module));
        }
        found
    }
}

/// Names one circle for each file that is in one, the shortest through the first such file.
fn circles(files: &Files) -> Vec<Violation> {
    let imports: BTreeMap<&Module, BTreeSet<&Module>> = files
        .files
        .keys()
        .map(|module| (module, files.imports(module)))
        .collect();
    let mut broken = Vec::new();
    let mut told: BTreeSet<&Module> = BTreeSet::new();
    for module in files.files.keys() {
        if told.contains(module) {
            continue;
        }
        if let Some(circle) = shortest(module, &imports) {
            let names: Vec<String> = circle.iter().map(|one| name(one)).collect();
            let rule = format!("a circle of imports: {}", names.join(" → "));
            broken.push(Violation::new(&files.files[module].0, 1, rule));
            told.extend(circle);
        }
    }
    broken
}

/// The shortest way from a module back to itself.
fn shortest<'a>(
    start: &'a Module,
    imports: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> Option<Vec<&'a Module>> {
    let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(module) = next.pop_front() {
        for target in &imports[module] {
            if *target == start {
                let mut way = vec![start, module];
                while let Some(one) = before.get(way[way.len() - 1]) {
                    way.push(one);
                }
                if module == start {
                    way.pop();
                }
                way.reverse();
                way.push(start);
                way.dedup();
                return Some(way);
            }
            if !before.contains_key(target) {
                before.insert(target, module);
                next.push_back(target);
            }
        }
    }
    None
}

fn name(module: &Module) -> String {
    match module.is_empty() {
        true => "lib".to_owned(),
        false => module.join("::"),
    }
}

/// What the `use` declarations of a file name.
fn uses(code: &str) -> Vec<NamedPath> {
    let mut found = Vec::new();
    for statement in code.split(';') {
        let Some((_, public, tree)) = declaration(statement) else {
            continue;
        };
        let mut paths = Vec::new();
        expand(&[], tree, &mut paths);
        found.extend(paths.into_iter().map(|(segments, alias)| NamedPath {
            segments,
            alias,
            public,
        }));
    }
    found
}

/// What stands before a `use` declaration that ends a statement, whether others see what it names,
/// and its tree.
fn declaration(statement: &str) -> Option<(&str, bool, &str)> {
    let at = statement.rfind("use ")?;
    let line = statement[..at].rfind('\n').map_or(0, |end| end + 1);
    let before = statement[line..at].trim();
    let is_one = before.is_empty() || before == "pub" || before.starts_with("pub(");
    is_one.then(|| (&statement[..line], !before.is_empty(), &statement[at + 4..]))
}

/// Takes a tree of a `use` declaration apart.
fn expand(prefix: &[String], tree: &str, found: &mut Vec<(Vec<String>, Option<String>)>) {
    let mut depth = 0;
    let parts = tree.split(|character| {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        character == ',' && depth == 0
    });
    for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
        let (path, inner) = match part.split_once('{') {
            Some((path, inner)) => (path, Some(inner.trim_end().trim_end_matches('}'))),
            None => (part, None),
        };
        let (path, alias) = match path.split_once(" as ") {
            Some((path, alias)) => (path, Some(alias.trim().to_owned())),
            None => (path, None),
        };
        let own = path
            .split("::")
            .map(str::trim)
            .filter(|one| !one.is_empty());
        let mut path: Vec<String> = prefix.to_vec();
        path.extend(own.map(str::to_owned));
        match inner {
            Some(inner) => expand(&path, inner, found),
            None => {
                if path.len() > 1 && path[path.len() - 1] == "self" {
                    path.pop();
                }
                found.push((path, alias));
            }
        }
    }
}

/// Paths in code but for those of `use` declarations.
fn mentions(code: &str) -> Vec<NamedPath> {
    let is_word = |character: char| character.is_alphanumeric() || "_:".contains(character);
    let statements = code.split(';');
    let others = statements.map(|one| declaration(one).map_or(one, |(before, ..)| before));
    let words = others.flat_map(|one| one.split(move |character| !is_word(character)));
    let paths = words.filter(|word| word.contains("::") && !word.starts_with(':'));
    paths
        .map(|path| NamedPath {
            segments: path
                .split("::")
                .filter(|one| !one.is_empty())
                .map(|one| one.trim_matches(':').to_owned())
                .collect(),
            alias: None,
            public: false,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(files: &[(&str, &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| {
            let path = Path::new("crates/process/src").join(path);
            (path, (*text).to_owned())
        };
        let files: Vec<_> = files.iter().map(file).collect();
        let circles = of_crate("process", &files);
        circles.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn files_that_import_each_other_are_named() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\n"),
            ("a.rs", "use crate::b::{self, C};\n"),
            ("b.rs", "pub use crate::c::C;\n"),
            ("c.rs", "fn f(a: crate::A) {}\n"),
        ];
        let want = [
            "crates/process/src/a.rs:1: a circle of imports: a → c → a",
            "crates/process/src/b.rs:1: a circle of imports: b → c → a → b",
        ];
        assert_eq!(rules(&files), want);
        let apart = &files[..3];
        assert_eq!(rules(apart), [""; 0]);
    }

    #[test]
    fn a_folder_and_what_it_uses_of_its_parent() {
        let child = ("a/inner.rs", "use super::{Own, other};\n");
        let parent = "mod inner;\nmod other;\npub use inner::Inner;\npub struct Own;\n";
        let other = ("a/other.rs", "//! nothing\n");
        assert_eq!(rules(&[("a/mod.rs", parent), child, other]), [""; 0]);
        let uses = format!("{parent}fn f() {{ inner::f(); }}\n");
        let want = ["crates/process/src/a/mod.rs:1: a circle of imports: a → a::inner → a"];
        assert_eq!(rules(&[("a/mod.rs", &uses), child, other]), want);
    }

    #[test]
    fn tests_and_comments_do_not_count() {
        let a = "//! crate::b\n// super::b::f\nfn f() { g(\"crate::b::f\"); }\n\
                 #[cfg(test)]\nmod tests {\nuse crate::b::f;\n}\n";
        assert_eq!(rules(&[("a.rs", a), ("b.rs", "use crate::a;\n")]), [""; 0]);
    }
}
