//! `--config`: the flags of a file, before those of the command line, which win. `--print-config` writes such a file.

use std::ffi::OsString;
use std::path::Path;

use clap::{ArgMatches, Command};
use toml::{Table, Value};

/// What `gpt` does without a subcommand, unless flags say otherwise.
const FIRST_RUN: &str = include_str!("first_run.toml");
/// Flags that are about the command line itself.
const OWN: [&str; 4] = ["config", "print_config", "help", "version"];

/// The command line with the flags of its file in front of its own; without a subcommand, those of the first run before both.
pub fn expanded(given: Vec<OsString>, train: &Command) -> Result<Vec<OsString>, String> {
    let mut words = given.into_iter();
    let program: Vec<OsString> = words.by_ref().take(1).collect();
    let mut rest: Vec<OsString> = words.collect();
    let first = rest.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let mut flags = Vec::new();
    match &first[..] {
        "generate" | "prepare" | "help" | "-h" | "--help" | "-V" | "--version" => {
            return Ok([program, rest].concat());
        }
        "train" | "profile" => drop(rest.remove(0)),
        _ => flags = self::flags(FIRST_RUN, Path::new("first_run.toml"), train)?,
    }
    if let Some(path) = named(&rest) {
        let text =
            std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", Path::new(&path).display()))?;
        flags.extend(self::flags(&text, Path::new(&path), train)?);
    }
    let name = if first == "profile" { "profile" } else { "train" };
    Ok([program, vec![name.into()], flags, rest].concat())
}

/// The file that `--config` names.
fn named(words: &[OsString]) -> Option<OsString> {
    let equals = |word: &OsString| word.to_str()?.strip_prefix("--config=").map(OsString::from);
    let place = words.iter().position(|word| word == "--config");
    place.and_then(|at| words.get(at + 1).cloned()).or_else(|| words.iter().find_map(equals))
}

/// The keys of a file as flags.
fn flags(text: &str, path: &Path, train: &Command) -> Result<Vec<OsString>, String> {
    let wrong = |why: String| format!("{}: {why}", path.display());
    let table: Table = text.parse().map_err(|e: toml::de::Error| wrong(e.to_string().replace('\n', " ")))?;
    let known: Vec<&str> = train.get_arguments().filter_map(|arg| arg.get_long()).collect();
    let flag = |(key, value): (&String, &Value)| {
        if !known.contains(&&key[..]) || OWN.contains(&&key.replace('-', "_")[..]) {
            let near = |name: &&&str| (strsim::jaro_winkler(name, key) * 1e6) as u64;
            let nearest =
                known.iter().filter(|name| !OWN.contains(&&name.replace('-', "_")[..])).max_by_key(near);
            let nearest = nearest.copied().unwrap_or_default();
            return Err(wrong(format!("there is no key {key:?}; the nearest is {nearest:?}")));
        }
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => value.to_string(),
            other => {
                let kind = other.type_str();
                return Err(wrong(format!(
                    "{key} has the type {kind}, wanted a number, a text, true or false"
                )));
            }
        };
        Ok(format!("--{key}={value}").into())
    };
    table.iter().map(flag).collect()
}

/// The flags of a run as a file for `--config`.
pub fn written(matches: &ArgMatches, train: &Command) -> String {
    let line = |arg: &clap::Arg| {
        let id = arg.get_id().as_str();
        let value =
            matches.get_raw(id).filter(|_| !OWN.contains(&id))?.next_back()?.to_string_lossy().into_owned();
        let plain = value.parse::<f64>().is_ok_and(f64::is_finite) || ["true", "false"].contains(&&value[..]);
        let value = if plain { value } else { Value::String(value).to_string() };
        Some(format!("{} = {value}\n", arg.get_long()?))
    };
    train.get_arguments().filter_map(line).collect()
}
