//! No loop of imports has more than three files.
//!
//! An import is a path that begins with `crate`, `super`, `self` or a child module. It leads to the file that defines the name, through
//! re-exports; a re-export itself is no import. A `mod.rs` may use the files of its folder. Tests are left out.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that one circle may have.
const FILES_MAX: usize = 3;

/// Folders with a crate each.
fn crates() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.lines().find(|line| line.starts_with("members")).expect("a list of members");
    members.split('"').skip(1).step_by(2).map(|member| root().join(member)).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A path of modules from the crate's root.
type Module = Vec<String>;

/// What one file says about names.
#[derive(Default)]
struct File {
    path: PathBuf,
    /// Items defined in it.
    defines: HashSet<String>,
    /// Paths that it uses, from the crate's root.
    uses: Vec<Module>,
    /// Names that it hands on, each with the path of the original; `*` for all of a module.
    hands_on: Vec<(String, Module)>,
}

/// The words and signs of a text without comments, texts in quotes and lifetimes.
fn tokens(text: &str) -> Vec<String> {
    let (mut tokens, mut chars) = (Vec::new(), text.chars().peekable());
    while let Some(c) = chars.next() {
        match c {
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|c| *c != '\n').is_some() {},
            '"' => {
                while let Some(c) = chars.next()
                    && c != '"'
                {
                    if c == '\\' {
                        chars.next();
                    }
                }
            }
            '\'' => {
                // a character or a lifetime
                let next = chars.next();
                if next == Some('\\') {
                    chars.next();
                }
                chars.next_if_eq(&'\'');
            }
            c if c.is_alphanumeric() || c == '_' => {
                let mut word = c.to_string();
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    word.push(c);
                }
                tokens.push(word);
            }
            ':' if chars.peek() == Some(&':') => {
                chars.next();
                tokens.push("::".into());
            }
            c if c.is_whitespace() => {}
            c => tokens.push(c.into()),
        }
    }
    tokens
}

/// The paths of a tree such as `a::{b, c as d}` that begins at `at`, each with the name under which it is known; and where it ends.
fn tree(tokens: &[String], at: usize, before: &Module, found: &mut Vec<(String, Module)>) -> usize {
    let (mut at, mut path) = (at, before.clone());
    let word = |at: usize| tokens.get(at).map_or("", String::as_str);
    loop {
        match word(at) {
            "{" => {
                at += 1;
                while !["}", ""].contains(&word(at)) {
                    at = tree(tokens, at, &path, found);
                    at += usize::from(word(at) == ",");
                }
                return at + 1;
            }
            name if name == "*" || name.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                path.push(name.to_string());
                at += 1;
            }
            _ => return at.max(1),
        }
        if word(at) == "::" && (word(at + 1).starts_with(|c: char| c.is_alphabetic() || "_{*".contains(c))) {
            at += 1;
            continue;
        }
        let renamed = word(at) == "as" && {
            at += 2;
            true
        };
        let name = if renamed { word(at - 1).to_string() } else { path.last().unwrap().clone() };
        found.push((name, path));
        return at;
    }
}

/// `super`, `self` and `crate` at the head of a path are resolved against the module that has it.
fn absolute(path: &Module, module: &Module, children: &HashSet<String>) -> Option<Module> {
    let mut base = match path[0].as_str() {
        "crate" => Vec::new(),
        "self" | "super" => module.clone(),
        first if children.contains(first) => [module.clone(), vec![first.to_string()]].concat(),
        _ => return None,
    };
    let rest = match path[0].as_str() {
        "super" => {
            let ups = path.iter().take_while(|p| *p == "super").count();
            base.truncate(base.len().checked_sub(ups)?);
            &path[ups..]
        }
        _ => &path[1..],
    };
    base.extend(rest.iter().filter(|segment| *segment != "self").cloned());
    Some(base)
}

/// Reads the file of `module` and those of its children.
fn read(path: &Path, folder: &Path, module: Module, files: &mut HashMap<Module, File>) {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tokens = tokens(&text);
    let word = |at: usize| tokens.get(at).map_or("", String::as_str);
    let (mut file, mut at, mut children) = (File { path: path.into(), ..File::default() }, 0, HashSet::new());
    let mut paths = Vec::new();
    while at < tokens.len() {
        match word(at) {
            // What follows `#[cfg(test)]`, up to its end, is left out.
            "cfg"
                if word(at + 1) == "("
                    && (word(at + 2) == "test" || (word(at + 2) == "all" && word(at + 4) == "test")) =>
            {
                let mut depth = 0;
                while at < tokens.len() {
                    depth += isize::from(word(at) == "{") - isize::from(word(at) == "}");
                    let ends = word(at) == ";" || word(at) == "}";
                    at += 1;
                    if ends && depth == 0 {
                        break;
                    }
                }
                continue;
            }
            "mod" if word(at + 2) == ";" => {
                let name = word(at + 1).to_string();
                let inner = [module.clone(), vec![name.clone()]].concat();
                let own = folder.join(&name);
                let beside = own.with_extension("rs");
                let path = if beside.exists() { beside } else { own.join("mod.rs") };
                if path.exists() {
                    read(&path, &own, inner, files);
                    children.insert(name);
                }
                at += 3;
            }
            "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union" | "macro_rules" => {
                let name = if word(at + 1) == "!" { word(at + 2) } else { word(at + 1) };
                file.defines.insert(name.to_string());
                at += 1;
            }
            "use" => {
                let public = at > 0 && (word(at - 1) == "pub" || word(at - 1) == ")");
                let mut found = Vec::new();
                at = tree(&tokens, at + 1, &Vec::new(), &mut found).max(at + 1);
                paths.extend(found.into_iter().map(|(name, path)| (public, name, path)));
            }
            "crate" | "super" | "self" if word(at + 1) == "::" && word(at.wrapping_sub(1)) != "::" => {
                let mut found = Vec::new();
                at = tree(&tokens, at, &Vec::new(), &mut found).max(at + 1);
                paths.extend(found.into_iter().map(|(name, path)| (false, name, path)));
            }
            name => {
                if word(at + 1) == "::" && children.contains(name) && word(at.wrapping_sub(1)) != "::" {
                    paths.push((false, name.to_string(), vec![name.to_string(), word(at + 2).to_string()]));
                }
                at += 1;
            }
        }
    }
    for (public, name, path) in paths.into_iter().filter(|(.., path)| !path.is_empty()) {
        match absolute(&path, &module, &children) {
            Some(path) if public => file.hands_on.push((name, path)),
            Some(path) => file.uses.push(path),
            None => {}
        }
    }
    files.insert(module, file);
}

/// The file that defines what `path` names.
fn resolve(path: &Module, files: &HashMap<Module, File>, depth: usize) -> Option<Module> {
    let held = (0..=path.len()).rev().find(|n| files.contains_key(&path[..*n]))?;
    let (module, rest) = path.split_at(held);
    let file = &files[module];
    let Some(name) = rest.first() else { return Some(module.to_vec()) };
    if file.defines.contains(name) || depth > 8 {
        return Some(module.to_vec());
    }
    let named = file.hands_on.iter().find(|(known, _)| known == name).map(|(_, to)| to.clone());
    let of_all = || {
        let globs = file.hands_on.iter().filter(|(known, _)| known == "*");
        globs.map(|(_, to)| [&to[..to.len() - 1], std::slice::from_ref(name)].concat()).find(|to| {
            resolve(to, files, depth + 1).is_some_and(|found| files[&found].defines.contains(name))
        })
    };
    match named.or_else(of_all) {
        Some(to) => resolve(&to, files, depth + 1),
        None => Some(module.to_vec()),
    }
}

/// Groups of modules that reach each other.
fn circles<'a>(edges: &'a HashMap<&Module, HashSet<Module>>) -> Vec<Vec<&'a Module>> {
    let reach = |from: &'a Module| {
        let (mut seen, mut waiting) = (HashSet::new(), vec![from]);
        while let Some(at) = waiting.pop() {
            waiting.extend(edges.get(at).into_iter().flatten().filter(|to| seen.insert(*to)));
        }
        seen
    };
    let reached: HashMap<&Module, HashSet<&Module>> = edges.keys().map(|m| (*m, reach(m))).collect();
    let (mut done, mut circles) = (HashSet::new(), Vec::new());
    for module in edges.keys() {
        let circle: Vec<&Module> = reached[module]
            .iter()
            .copied()
            .filter(|m| reached.get(m).is_some_and(|r| r.contains(module)))
            .collect();
        if circle.len() > 1 && done.insert(circle.iter().copied().min()) {
            circles.push(circle);
        }
    }
    circles
}

#[test]
fn no_circle_of_imports_has_more_than_three_files() {
    let (mut large, mut read_files) = (Vec::new(), 0);
    for source in crates().into_iter().map(|folder| folder.join("src")).chain([root().join("src")]) {
        let mut files = HashMap::new();
        if !source.join("lib.rs").exists() {
            continue;
        }
        read(&source.join("lib.rs"), &source, Vec::new(), &mut files);
        read_files += files.len();
        let edges: HashMap<&Module, HashSet<Module>> = files
            .iter()
            .map(|(module, file)| {
                let to = file
                    .uses
                    .iter()
                    .filter_map(|path| resolve(path, &files, 0))
                    .filter(|to| !to.starts_with(module));
                (module, to.collect())
            })
            .collect();
        for circle in circles(&edges).into_iter().filter(|circle| circle.len() > FILES_MAX) {
            let mut lines: Vec<String> = Vec::new();
            for module in &circle {
                let to = edges[module].iter().filter(|to| circle.contains(to));
                let to: Vec<String> = to.map(|to| to.join("::")).collect();
                lines.push(format!(
                    "{} -> {}",
                    files[*module].path.strip_prefix(root()).unwrap().display(),
                    to.join(", ")
                ));
            }
            lines.sort();
            large.push(lines.join("\n    "));
        }
    }
    assert!(read_files > 400, "read only {read_files} files");
    assert!(large.is_empty(), "files that import each other in a loop:\n    {}", large.join("\n\n    "));
}
