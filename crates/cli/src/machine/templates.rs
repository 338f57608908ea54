//! `stillframe vm templates`: memory that machines share.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vm::qemu::Template;

use crate::exit::{Failure, Status};
use crate::output;

/// List the copies of memory that machines share, or end one
#[derive(Debug, Args)]
pub struct Templates {
    /// Keep the one of this image no longer; machines that have it go on
    #[arg(long, value_name = "IMAGE")]
    drop: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Templates {
    /// Lists them, or ends one.
    ///
    /// # Errors
    /// The folder cannot be read, or there is no such template.
    pub fn run(self) -> Result<Status, Failure> {
        let folder = folder();
        let failed = Failure::machine("vm templates");
        if let Some(image) = &self.drop {
            return match vm::qemu::drop_template(&folder, image).map_err(failed)? {
                true => {
                    if self.json {
                        output::say(&format!(
                            "{}\n",
                            json!({"vm_templates": {"dropped": image}})
                        ));
                    }
                    Ok(Status::Done)
                }
                false => Err(Failure::machine("vm templates")(vm::Error::Gone(format!(
                    "there is no template of image {image}"
                )))),
            };
        }
        let all = vm::qemu::templates(&folder).map_err(failed)?;
        output::tell(
            self.json,
            || to_json(&all),
            || all.iter().map(to_text).collect(),
        );
        Ok(Status::Done)
    }
}

/// Returns the directory of keepers' sockets.
pub fn folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !rustix::process::geteuid().is_root());
    let folder = own.map_or_else(|| PathBuf::from("/run"), PathBuf::from);
    folder.join("stillframe/templates")
}

fn to_json(all: &[Template]) -> serde_json::Value {
    let template = |one: &Template| {
        json!({
            "image": one.image,
            "bytes": one.bytes,
            "machines": one.machines,
            "pooled": one.pooled,
            "age_seconds": one.age.as_secs(),
        })
    };
    let templates = all.iter().map(template).collect::<Vec<_>>();
    json!({"vm_templates": { "templates": templates }})
}

fn to_text(one: &Template) -> String {
    format!(
        "{}: {} MiB, {} machines, {} waiting, {} s old\n",
        one.image,
        one.bytes >> 20,
        one.machines,
        one.pooled,
        one.age.as_secs()
    )
}
