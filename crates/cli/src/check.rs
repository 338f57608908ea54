//! `stillframe check`: tells what this kernel and these privileges allow.

use std::path::Path;
use std::time::Instant;

use process::HostFacts;
use serde_json::{Value, json};
use sys::features::{self, Feature, Need, Outcome};

use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::options::Options;
use crate::output;

/// A feature that was tried.
struct FeatureResult {
    feature: &'static Feature,
    outcome: Outcome,
}

/// Tries features and tells which are there.
///
/// # Errors
/// A feature of that name does not exist.
pub fn run(options: &Options, started: Instant) -> Result<Status, Failure> {
    if options.image.is_some() && !options.feature.is_empty() {
        let what = "--image and --feature exclude each other";
        return Err(Failure::Usage(what.to_owned()));
    }
    options.close_descriptors()?;
    let work_dir = options.work_dir.as_deref();
    options.open_log(work_dir.unwrap_or(Path::new(".")), None, started)?;
    if options.feature.iter().any(|name| name == "list") {
        let names: Vec<_> = features::all().map(|feature| feature.name).collect();
        output::say(&format!("{}\n", names.join("\n")));
        return Ok(Status::Done);
    }
    if let Some(directory) = &options.image {
        return run_image(options, directory);
    }
    if options.feature.is_empty() {
        Ok(run_all(options))
    } else {
        run_named(options)
    }
}

fn run_named(options: &Options) -> Result<Status, Failure> {
    let mut chosen = Vec::new();
    for name in &options.feature {
        let feature = features::named(name);
        chosen.push(feature.ok_or_else(|| Failure::NoSuchFeature(name.clone()))?);
    }
    let tried: Vec<FeatureResult> = chosen.into_iter().map(FeatureResult::new).collect();
    let missing = tried.iter().any(|tried| tried.outcome.is_err());
    if options.json {
        output::say(&format!("{}\n", to_json(&tried)));
    } else {
        for FeatureResult { feature, outcome } in &tried {
            match outcome {
                Ok(_) => output::say(&format!("{} is supported\n", feature.name)),
                Err(why) => {
                    output::complain(&format!("{} is not supported: {why}\n", feature.name));
                }
            }
        }
    }
    Ok(if missing {
        Status::Failed
    } else {
        Status::Done
    })
}

/// Tells what an image needs.
fn run_image(options: &Options, directory: &Path) -> Result<Status, Failure> {
    let needs = process::needs(&directory.into()).map_err(|source| {
        let failure = Failure::engine("check")(source);
        ExpectedKind::Tree.explain(directory, failure)
    })?;
    let is_met = needs.iter().all(|need| need.outcome.is_ok());
    if options.json {
        let all = needs.iter().map(|need| {
            json!({
                "name": need.name,
                "what": need.what,
                "met": need.outcome.is_ok(),
                "remark": need.outcome.as_ref().ok(),
                "why": need.outcome.as_ref().err(),
            })
        });
        output::say(&format!("{}\n", json!({"needs": all.collect::<Vec<_>>()})));
    } else {
        for need in &needs {
            let answer = if need.outcome.is_ok() { "yes" } else { "NO" };
            output::say(&line(need.name, answer, need.what, &need.outcome));
        }
        let words = if is_met {
            "It can be restored."
        } else {
            "It cannot be restored."
        };
        output::say(&format!("{words}\n"));
    }
    Ok(if is_met { Status::Done } else { Status::Failed })
}

fn run_all(options: &Options) -> Status {
    let mut tried = Vec::new();
    for feature in features::all() {
        let one = FeatureResult::new(feature);
        if !options.json {
            output::say(&one.line());
        }
        tried.push(one);
    }
    let missing = |need| {
        tried
            .iter()
            .any(|tried| tried.feature.need == need && tried.outcome.is_err())
    };
    let strict = options.extra;
    let (words, status) = match (missing(Need::Always), strict && missing(Need::Sometimes)) {
        (true, _) => ("Does not look good.", Status::Failed),
        (false, true) => ("Looks good but some features are missing.", Status::Failed),
        (false, false) => ("Looks good.", Status::Done),
    };
    let host = process::probe_host();
    if options.json {
        let mut all = to_json(&tried);
        all["host"] = host.as_ref().map_or(Value::Null, host_to_json);
        output::say(&format!("{all}\n"));
    } else {
        let host = host.as_ref().map_or_else(ToString::to_string, host_line);
        output::say(&format!("{host}\n{words}\n"));
    }
    status
}

fn build_id(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn host_to_json(host: &HostFacts) -> Value {
    let functions = host.vdso.functions.iter();
    json!({
        "vdso_build_id": build_id(&host.vdso.build_id),
        "vdso_32_build_id": host.vdso_32.as_ref().map(|vdso| build_id(&vdso.build_id)),
        "vdso_bytes": host.vdso.bytes(),
        "vdso_functions": functions.map(|one| one.name.as_str()).collect::<Vec<_>>(),
        "kept": host.kept,
    })
}

fn host_line(host: &HostFacts) -> String {
    let functions = host.vdso.functions.len();
    let from = if host.kept {
        "as kept before"
    } else {
        "not kept before"
    };
    let (id, bytes) = (build_id(&host.vdso.build_id), host.vdso.bytes());
    format!("vDSO {id}: {bytes} bytes, {functions} names of functions ({from})")
}

impl FeatureResult {
    fn new(feature: &'static Feature) -> Self {
        let outcome = feature.probe();
        match &outcome {
            Ok(_) => log::info!("{} is supported", feature.name),
            Err(why) => log::warn!("{} is not supported: {why}", feature.name),
        }
        Self { feature, outcome }
    }

    fn line(&self) -> String {
        let Self { feature, outcome } = self;
        let answer = match (outcome, feature.need) {
            (Ok(_), _) => "yes",
            (Err(_), Need::Always) => "NO",
            (Err(_), Need::Sometimes) => "no",
        };
        line(feature.name, answer, feature.what, outcome)
    }
}

fn line(name: &str, answer: &str, what: &str, outcome: &Outcome) -> String {
    let remark = match outcome {
        Ok(remark) | Err(remark) if remark.is_empty() => String::new(),
        Ok(remark) | Err(remark) => format!(" ({remark})"),
    };
    format!("{name:<26} {answer:<3} {what}{remark}\n")
}

fn to_json(tried: &[FeatureResult]) -> Value {
    let features: Vec<Value> = tried
        .iter()
        .map(|FeatureResult { feature, outcome }| {
            json!({
                "name": feature.name,
                "what": feature.what,
                "required": feature.need == Need::Always,
                "supported": outcome.is_ok(),
                "why": outcome.as_ref().err(),
            })
        })
        .collect();
    json!({"features": features})
}
