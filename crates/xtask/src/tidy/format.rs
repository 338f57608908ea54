//! The list of records in docs/format.md, made from the sources: numbers, kinds and messages.
use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::page::Page;
use super::source::code_lines;
use super::tree::{read, rust_files};
use super::violation::Violation;
use crate::error::Result;

/// The page.
const PAGE: Page = Page {
    path: "docs/format.md",
    mark: "records",
    part: "the list of records",
};
/// The crates that declare records.
const CRATES: &[&str] = &["freeze", "process", "resources", "vm", "volume"];

/// How a file names the crate that carries messages between processes.
const HELPERS: &str = "use guard::";

/// A record's number: a constant `TAG`, or one in a file `tags.rs` or a module `tag`.
#[derive(Debug, PartialEq, Eq)]
struct Tag {
    number: u16,
    name: String,
    doc: String,
    path: PathBuf,
    line: usize,
}

/// A kind or a part: the constant of its number, and its name.
#[derive(Debug, PartialEq, Eq)]
struct Claim {
    constant: String,
    name: String,
    path: PathBuf,
}

/// What the sources declare.
#[derive(Default)]
struct Declarations {
    tags: Vec<Tag>,
    claims: Vec<Claim>,
    /// Messages and enumerations in protobuf's words, by file.
    messages: Vec<(PathBuf, Vec<String>)>,
}

/// Checks that the page lists what the sources declare, and that no number is used twice.
pub fn check(root: &Path) -> Result<Vec<Violation>> {
    if !PAGE.exists(root) {
        return Ok(Vec::new());
    }
    let declared = declared(root)?;
    let mut broken = doubles(&declared.tags);
    broken.extend(PAGE.check(root, &render(&declared))?);
    Ok(broken)
}

/// Writes the list again.
pub fn fix(root: &Path) -> Result<()> {
    match PAGE.exists(root) {
        true => PAGE.fix(root, &render(&declared(root)?)),
        false => Ok(()),
    }
}

fn doubles(tags: &[Tag]) -> Vec<Violation> {
    let mut broken = Vec::new();
    for (index, tag) in tags.iter().enumerate() {
        if tags[..index].iter().any(|other| other.number == tag.number) {
            let rule = format!("record number {} is used twice", tag.number);
            broken.push(Violation::new(&tag.path, tag.line, rule));
        }
    }
    broken
}

fn declared(root: &Path) -> Result<Declarations> {
    let mut declared = Declarations::default();
    for path in rust_files(root)? {
        if !CRATES.contains(&super::source::crate_name(&path)) {
            continue;
        }
        let text = read(root, &path)?;
        let lines: Vec<&str> = text.lines().collect();
        let lines = &lines[..code_lines(&path, &lines)];
        declared.tags.extend(tags(&path, lines));
        declared.claims.extend(claims(&path, lines));
        // A file that speaks with helper processes has their messages, which no image has.
        let is_of_helper = lines.iter().any(|line| line.starts_with(HELPERS));
        let messages = messages(lines);
        if !messages.is_empty() && !is_of_helper {
            declared.messages.push((path, messages));
        }
    }
    declared.tags.sort_by_key(|tag| tag.number);
    Ok(declared)
}

fn render(declared: &Declarations) -> String {
    let mut out = String::from("\n| number | record | declared in |\n| ---: | --- | --- |\n");
    for tag in &declared.tags {
        let claim = declared.claims.iter().find(|claim| claim.claims(tag));
        let path = claim.map_or(&tag.path, |claim| &claim.path).display();
        let name = match claim {
            Some(claim) => claim.name.clone(),
            None if tag.doc.is_empty() => tag.name.to_lowercase().replace('_', " "),
            None => tag.doc.clone(),
        };
        let _ = writeln!(out, "| {} | {name} | {path} |", tag.number);
    }
    out.push_str("\nThe messages, as protobuf would declare them:\n\n```proto\n");
    for (path, messages) in &declared.messages {
        let _ = writeln!(out, "// {}", path.display());
        for message in messages {
            out.push_str(message);
        }
        out.push('\n');
    }
    let end = out.trim_end().len();
    out.truncate(end);
    out.push_str("\n```\n\n");
    out
}

impl Claim {
    fn claims(&self, tag: &Tag) -> bool {
        self.constant == tag.name && (tag.name != "TAG" || self.path == tag.path)
    }
}

/// Finds `const NAME: u16 = N;` where it is a record's number.
fn tags(path: &Path, lines: &[&str]) -> Vec<Tag> {
    let mut found = Vec::new();
    let mut inside = path
        .file_stem()
        .is_some_and(|stem| stem == "tags" || stem == "tag");
    let mut doc = "";
    for (number, line) in (1..).zip(lines) {
        let line = line.trim();
        if line.ends_with("mod tag {") || line.ends_with("mod tags {") {
            inside = true;
        }
        if let Some(text) = line.strip_prefix("/// ") {
            doc = if doc.is_empty() { text } else { doc };
            continue;
        }
        let constant = line
            .split_once("const ")
            .and_then(|(_, rest)| rest.split_once(": u16 = "));
        if let Some((name, value)) = constant
            && (inside || name == "TAG")
            && let Ok(value) = value.trim_end_matches(';').replace('_', "").parse()
        {
            found.push(Tag {
                number: value,
                name: name.into(),
                // The number of a file's one record is described by the file's name.
                doc: if name == "TAG" {
                    file_name(path)
                } else {
                    plain(doc)
                },
                path: path.into(),
                line: number,
            });
        }
        doc = "";
    }
    found
}

fn file_name(path: &Path) -> String {
    path.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .replace('_', " ")
}

/// Takes links and the full stop out of a sentence.
fn plain(doc: &str) -> String {
    doc.trim_end_matches('.')
        .replace(['[', ']', '`'], "")
        .replace("super::", "")
}

/// Finds `const TAG: u16 = CONSTANT;` in an implementation, or `fn tag(&self) -> u16 { CONSTANT }`,
/// and the name after it.
fn claims(path: &Path, lines: &[&str]) -> Vec<Claim> {
    let mut found: Vec<Claim> = Vec::new();
    for pair in lines.windows(2) {
        let [head, body] = [pair[0].trim(), pair[1].trim()];
        let inside = pair[0].starts_with(' ');
        let constant = match head {
            "fn tag(&self) -> u16 {" => Some(body),
            _ => head.strip_prefix("const TAG: u16 = ").filter(|_| inside),
        };
        if let Some(constant) = constant {
            let constant = constant.rsplit("::").next().unwrap_or(constant);
            found.push(Claim {
                constant: constant.trim_end_matches(';').into(),
                name: String::new(),
                path: path.into(),
            });
        }
        let name = match head {
            "fn name(&self) -> &'static str {" => Some(body),
            _ => head.strip_prefix("const NAME: &'static str = "),
        };
        if let (Some(name), Some(claim)) = (name, found.last_mut()) {
            claim.name = name.trim_matches(['"', ';']).into();
        }
    }
    found
}

/// Finds what derives prost's `Message`, `Enumeration` or `Oneof`.
fn messages(lines: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some(derived) = line.trim().strip_prefix("#[derive(") else {
            continue;
        };
        let word = ["Message", "Enumeration", "Oneof"]
            .into_iter()
            .find(|word| derived.contains(word));
        let head = lines[number..]
            .iter()
            .position(|line| !line.trim().starts_with("#["));
        if let (Some(word), Some(head)) = (word, head) {
            let head = number + head;
            let end = lines[head..]
                .iter()
                .position(|line| *line == "}" || line.ends_with("{}"));
            found.push(message(word, &lines[head..=head + end.unwrap_or(0)]));
        }
    }
    found
}

/// Renders one declaration, given from its head to its closing brace.
fn message(word: &str, lines: &[&str]) -> String {
    let mut head = lines[0]
        .split_whitespace()
        .skip_while(|word| !["struct", "enum"].contains(word));
    let name = head.nth(1).unwrap_or_default();
    let keyword = match word {
        "Message" => "message",
        "Enumeration" => "enum",
        _ => "oneof",
    };
    let mut out = format!("{keyword} {name} {{\n");
    let mut attribute = String::new();
    for line in &lines[1..] {
        let line = line.trim();
        if line.starts_with("#[prost(") || (!attribute.is_empty() && !attribute.ends_with(")]")) {
            attribute.push_str(line);
        } else if word == "Enumeration" {
            if let Some((name, value)) = line.trim_end_matches(',').split_once(" = ") {
                let _ = writeln!(out, "  {name} = {value};");
            }
        } else if !attribute.is_empty() && !line.starts_with("//") {
            let _ = writeln!(out, "  {}", field(&attribute, line));
            attribute.clear();
        }
    }
    out.push_str("}\n");
    out
}

/// Renders a field from its prost attribute and its Rust declaration.
fn field(attribute: &str, declaration: &str) -> String {
    let words = attribute
        .trim_start_matches("#[prost(")
        .trim_end_matches(")]");
    let value = |key: &str| {
        let (_, rest) = words.split_once(&format!("{key} = \""))?;
        rest.split('"').next()
    };
    let declaration = declaration.trim_end_matches(',');
    let (name, kind) = match declaration.split_once(": ") {
        Some((name, kind)) => (name.rsplit(' ').next().unwrap_or(name), kind),
        // A variant of a oneof: `Name(Type)`.
        None => declaration
            .trim_end_matches(')')
            .split_once('(')
            .unwrap_or((declaration, "")),
    };
    if let Some(choice) = value("oneof") {
        return format!("oneof {choice} {name};");
    }
    let first = words.split([',', ' ']).next().unwrap_or_default();
    let kind = match first {
        "message" => kind
            .rsplit(['<', ':'])
            .next()
            .unwrap_or(kind)
            .trim_end_matches('>'),
        "enumeration" => value("enumeration").unwrap_or(first),
        other => other,
    };
    let label = ["repeated", "optional"]
        .into_iter()
        .find(|label| words.split(", ").any(|word| word == *label));
    let label = label.map_or(String::new(), |label| format!("{label} "));
    format!("{label}{kind} {name} = {};", value("tag").unwrap_or("?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"//! Pipes.
/// The number.
pub const TAG: u16 = 1_04;
/// One end.
#[derive(Clone, PartialEq, Message)]
struct Record {
    /// The first.
    #[prost(uint32, repeated, tag = "1")]
    pub first: Vec<u32>,
    #[prost(message, optional, tag = "2")]
    queue: Option<super::Queue>,
    #[prost(bytes = "vec", tag = "3")]
    name: Vec<u8>,
    #[prost(enumeration = "State", tag = "4")]
    state: i32,
}
#[derive(Clone, Copy, prost::Enumeration)]
#[repr(i32)]
enum State {
    /// Runs.
    Running = 0,
    Stopped = 1,
}
impl Kind for Pipe {
    type Record = Record;
    const TAG: u16 = TAG;
    const NAME: &'static str = "pipe";
}
"#;

    #[test]
    fn records_and_messages_are_read_from_the_source() {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("crates/resources/src/fd");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::create_dir_all(tree.path().join("docs")).unwrap();
        std::fs::write(folder.join("pipe.rs"), SOURCE).unwrap();
        let page = "# Format\n<!-- records:begin -->\nold\n<!-- records:end -->\nmore\n";
        std::fs::write(tree.path().join(PAGE.path), page).unwrap();

        let broken = check(tree.path()).unwrap();
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].line, 3);
        fix(tree.path()).unwrap();
        assert_eq!(check(tree.path()).unwrap(), []);
        let page = std::fs::read_to_string(tree.path().join(PAGE.path)).unwrap();
        let want = "# Format\n<!-- records:begin -->\n\n\
            | number | record | declared in |\n| ---: | --- | --- |\n\
            | 104 | pipe | crates/resources/src/fd/pipe.rs |\n\n\
            The messages, as protobuf would declare them:\n\n```proto\n\
            // crates/resources/src/fd/pipe.rs\n\
            message Record {\n  repeated uint32 first = 1;\n  optional Queue queue = 2;\n\
            \x20 bytes name = 3;\n  State state = 4;\n}\n\
            enum State {\n  Running = 0;\n  Stopped = 1;\n}\n```\n\n\
            <!-- records:end -->\nmore\n";
        assert_eq!(page, want);
    }

    #[test]
    fn a_number_used_twice_is_named() {
        let lines = [
            "mod tag {",
            "/// [`super::Tree`], one an image.",
            "pub const TREE: u16 = 1;",
        ];
        let mut both = tags(Path::new("a.rs"), &lines);
        assert_eq!(both[0].doc, "Tree, one an image");
        both.extend(tags(Path::new("tags.rs"), &["pub const PIPE: u16 = 1;"]));
        let broken: Vec<_> = doubles(&both).iter().map(ToString::to_string).collect();
        assert_eq!(broken, ["tags.rs:1: record number 1 is used twice"]);
    }
}
