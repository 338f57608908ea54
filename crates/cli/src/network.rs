//! `stillframe network`: what holds back the connections of images that were not restored yet.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use process::report::printable;
use process::{Clearing, NetworkTable, Standing, clear_network, network_tables};
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::output;

/// List or clear what holds back the connections of images that were not restored yet
#[derive(Debug, Args)]
pub struct Network {
    /// List the tables of nf_tables that do so, or remove those whose image is gone
    #[arg(value_enum)]
    action: Action,

    /// Clear all, also those whose image is there: its connections are lost then
    #[arg(long)]
    all: bool,

    /// Clear those of the image in this directory, or of one that was there
    #[arg(
        short = 'D',
        long,
        visible_alias = "image",
        value_name = "DIR",
        conflicts_with = "all"
    )]
    images_dir: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Action {
    List,
    Clear,
}

impl Network {
    /// Lists or clears.
    ///
    /// # Errors
    /// The kernel refuses it, or the options make no sense.
    pub fn run(self) -> Result<Status, Failure> {
        let which = match (self.all, self.images_dir) {
            (true, _) => Clearing::All,
            (false, Some(dir)) => Clearing::Image(dir),
            (false, None) => Clearing::Gone,
        };
        let tables = match self.action {
            Action::Clear => clear_network(&which),
            Action::List if which == Clearing::Gone => network_tables(),
            Action::List => {
                let why = "`network list` lists all tables: --all and --image belong to `clear`";
                return Err(Failure::Usage(why.to_owned()));
            }
        };
        let tables = tables.map_err(Failure::engine("network"))?;
        let text = match (self.json, self.action) {
            (true, action) => format!("{}\n", to_json(&tables, action)),
            (false, Action::List) => to_text(&tables),
            (false, Action::Clear) if tables.is_empty() => "nothing was to be cleared\n".to_owned(),
            (false, Action::Clear) => format!("cleared\n{}", to_text(&tables)),
        };
        output::say(&text);
        Ok(Status::Done)
    }
}

fn name(standing: Standing) -> &'static str {
    match standing {
        Standing::Waits => "waits for its restore",
        Standing::ImageGone => "its image is gone",
        Standing::Unknown => "it is not known where its image is",
        Standing::DumpUnderWay => "a dump is under way",
    }
}

fn to_json(tables: &[NetworkTable], action: Action) -> Value {
    let state = |table: &NetworkTable| match table.standing {
        Standing::Waits => "waits",
        Standing::ImageGone => "image-gone",
        Standing::Unknown => "unknown",
        Standing::DumpUnderWay => "dump-under-way",
    };
    let table = |table: &NetworkTable| {
        json!({
            "table": table.name,
            "image": table.image,
            "pid": table.root,
            "dumped": table.since,
            "images_dir": table.images_dir.as_ref().map(|dir| dir.display().to_string()),
            "state": state(table),
            "connections": table.connections.iter()
                .map(|(local, remote)| json!({
                    "local": local.to_string(),
                    "remote": remote.to_string(),
                }))
                .collect::<Vec<_>>(),
        })
    };
    let tables = tables.iter().map(table).collect::<Vec<_>>();
    match action {
        Action::List => json!({"tables": tables}),
        Action::Clear => json!({"cleared": tables}),
    }
}

fn to_text(tables: &[NetworkTable]) -> String {
    let mut text = String::new();
    for table in tables {
        // Writing to a string cannot fail.
        let _ = write_table(&mut text, table);
    }
    text
}

fn write_table(text: &mut String, table: &NetworkTable) -> std::fmt::Result {
    writeln!(text, "{}: {}", table.name, name(table.standing))?;
    if let (Some(image), Some(root), Some(since)) = (&table.image, table.root, &table.since) {
        writeln!(text, "  image {}", printable(image))?;
        writeln!(text, "  of pid {root}, dumped {}", printable(since))?;
    }
    if let Some(dir) = &table.images_dir {
        writeln!(text, "  in {}", printable(&dir.display().to_string()))?;
    }
    for (local, remote) in &table.connections {
        writeln!(text, "  drops the packets between {local} and {remote}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_told() {
        let table = NetworkTable {
            name: "stillframe-0123456789abcdef".to_owned(),
            image: Some("ab12".to_owned()),
            root: Some(4711),
            since: Some("2026-01-02 03:04:05 UTC".to_owned()),
            images_dir: Some("/img/1".into()),
            connections: vec![(([127, 0, 0, 1], 80).into(), ([127, 0, 0, 1], 4000).into())],
            standing: Standing::Waits,
        };
        insta::assert_snapshot!(to_text(std::slice::from_ref(&table)), @r"
        stillframe-0123456789abcdef: waits for its restore
          image ab12
          of pid 4711, dumped 2026-01-02 03:04:05 UTC
          in /img/1
          drops the packets between 127.0.0.1:80 and 127.0.0.1:4000
        ");
        let json = to_json(&[table], Action::Clear);
        assert_eq!(json["cleared"][0]["pid"], 4711);
        assert_eq!(
            json["cleared"][0]["connections"][0]["local"],
            "127.0.0.1:80"
        );
    }
}
