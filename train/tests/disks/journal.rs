//! [`Journal`]: the changes to files that the layer `shim.c` has recorded. [`Disk`]: which of them a power cut leaves.
//!
//! The model is weaker than any file system's promise: of what was not synced, each write, each sector of a write and each change of a
//! folder's entries is on disk or is not, by itself. A synced file has its content, and a synced folder its entries.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A change to files. Files and folders are numbered.
#[derive(Debug)]
pub enum Change {
    Truncate(usize, usize),
    Write(usize, usize, Vec<u8>),
    /// Entries of folders that change together: the folder, the name, and what it names from then on.
    Entries(Vec<(usize, String, Option<usize>)>),
    Sync(usize),
}

/// What processes have done to a folder, in order.
#[derive(Default)]
pub struct Journal {
    pub changes: Vec<Change>,
    /// By number: whether it is a folder. The first is the watched one.
    pub folders: Vec<bool>,
}

/// The files and folders that are there at a place in the journal.
struct Names {
    by_inode: HashMap<u64, usize>,
    entries: HashMap<(usize, String), usize>,
}

impl Names {
    /// The folder and the name of a path.
    fn place(&self, root: &Path, path: &str) -> (usize, String) {
        let path = Path::new(path).strip_prefix(root).unwrap();
        let mut names: Vec<String> = path.iter().map(|name| name.to_str().unwrap().into()).collect();
        let name = names.pop().unwrap();
        let folder = names.into_iter().fold(0, |folder, name| self.entries[&(folder, name)]);
        (folder, name)
    }
}

impl Journal {
    /// Reads a journal of changes in the folder `root`, which was empty.
    pub fn read(path: &Path, root: &Path) -> Journal {
        let bytes = fs::read(path).unwrap();
        let mut journal = Journal { changes: Vec::new(), folders: vec![true] };
        let inode = fs::metadata(root).unwrap().ino();
        let mut names = Names { by_inode: HashMap::from([(inode, 0)]), entries: HashMap::new() };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let short = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
            let long = |at: usize| u64::from_le_bytes(rest[at..at + 8].try_into().unwrap());
            let (kind, lengths) = (short(0), [short(4), short(8), short(12)]);
            let (inode, at) = (long(16), long(24) as usize);
            let (a, tail) = rest[40..].split_at(lengths[0]);
            let (b, tail) = tail.split_at(lengths[1]);
            let (data, tail) = tail.split_at(lengths[2]);
            let [a, b] = [a, b].map(|text| std::str::from_utf8(text).unwrap());
            journal.add(&mut names, root, kind, (inode, at), [a, b], data);
            rest = tail;
        }
        journal
    }

    fn add(
        &mut self,
        names: &mut Names,
        root: &Path,
        kind: usize,
        (inode, at): (u64, usize),
        [a, b]: [&str; 2],
        data: &[u8],
    ) {
        let known = |names: &Names| names.by_inode.get(&inode).copied();
        let change = match kind {
            // A new file, a new folder.
            1 | 4 => {
                let number = self.folders.len();
                self.folders.push(kind == 4);
                names.by_inode.insert(inode, number);
                let (folder, name) = names.place(root, a);
                names.entries.insert((folder, name.clone()), number);
                Change::Entries(vec![(folder, name, Some(number))])
            }
            2 => Change::Truncate(known(names).unwrap(), at),
            3 => Change::Write(known(names).unwrap(), at, data.to_vec()),
            5 | 6 => {
                let (old, new) = (names.place(root, a), names.place(root, b));
                let number = names.entries[&old];
                names.entries.insert(new.clone(), number);
                let mut entries = vec![(new.0, new.1, Some(number))];
                if kind == 5 {
                    names.entries.remove(&old);
                    entries.push((old.0, old.1, None));
                }
                Change::Entries(entries)
            }
            7 => {
                let (folder, name) = names.place(root, a);
                names.entries.remove(&(folder, name.clone()));
                Change::Entries(vec![(folder, name, None)])
            }
            // Folders above the watched one are synced too.
            8 => match known(names) {
                Some(number) => Change::Sync(number),
                None => return,
            },
            kind => panic!("a change of kind {kind}"),
        };
        self.changes.push(change);
    }
}

/// What a power cut does to changes that were not synced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// All are lost.
    All,
    /// None is.
    Nothing,
    /// Entries of folders are kept, and files have their sizes, but zeros in place of data.
    Zeros,
    /// Entries of folders are kept, and no data.
    Data,
    /// The first entries are kept, as a file system with a journal does, and any sectors.
    Ordered,
    /// Any entries are kept, and any sectors.
    Any,
}

pub const LOSSES: [Loss; 6] = [Loss::All, Loss::Nothing, Loss::Zeros, Loss::Data, Loss::Ordered, Loss::Any];

const SECTOR: usize = 512;

/// Where data is written, or without data the length to which a file is cut.
type Unsynced = (usize, Option<Vec<u8>>);

/// The disk while the journal is replayed: what was synced, and the changes since.
#[derive(Default)]
pub struct Disk {
    content: HashMap<usize, Vec<u8>>,
    unsynced: HashMap<usize, Vec<Unsynced>>,
    entries: BTreeMap<(usize, String), usize>,
    pending: Vec<Vec<(usize, String, Option<usize>)>>,
}

/// Files by their paths, and folders as `None`.
pub type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

impl Disk {
    pub fn apply(&mut self, change: &Change, folders: &[bool]) {
        match change {
            Change::Truncate(file, length) => self.unsynced.entry(*file).or_default().push((*length, None)),
            Change::Write(file, at, data) => {
                self.unsynced.entry(*file).or_default().push((*at, Some(data.clone())))
            }
            Change::Entries(entries) => self.pending.push(entries.clone()),
            Change::Sync(folder) if folders[*folder] => {
                let pending = std::mem::take(&mut self.pending);
                let touches =
                    |change: &Vec<(usize, String, Option<usize>)>| change.iter().any(|(of, ..)| of == folder);
                let (synced, pending): (Vec<_>, Vec<_>) = pending.into_iter().partition(touches);
                self.pending = pending;
                synced.into_iter().flatten().for_each(|entry| set(&mut self.entries, entry));
            }
            Change::Sync(file) => {
                let content = self.content.entry(*file).or_default();
                for (at, data) in self.unsynced.remove(file).unwrap_or_default() {
                    put(content, at, data.as_deref(), |_| true);
                }
            }
        }
    }

    /// What is found after a power cut.
    pub fn after(&self, loss: Loss, draw: &mut impl FnMut(usize) -> usize, folders: &[bool]) -> Tree {
        let mut entries = self.entries.clone();
        let first = draw(self.pending.len() + 1);
        for (number, change) in self.pending.iter().enumerate() {
            let kept = match loss {
                Loss::All => false,
                Loss::Nothing | Loss::Zeros | Loss::Data => true,
                Loss::Ordered => number < first,
                Loss::Any => draw(2) == 0,
            };
            if kept {
                change.iter().cloned().for_each(|entry| set(&mut entries, entry));
            }
        }
        let mut content = |file: usize| {
            let mut content = self.content.get(&file).cloned().unwrap_or_default();
            for (at, data) in self.unsynced.get(&file).into_iter().flatten() {
                let data = data.as_deref();
                match loss {
                    Loss::All | Loss::Data => {}
                    Loss::Nothing => put(&mut content, *at, data, |_| true),
                    Loss::Zeros => put(&mut content, *at, data, |_| false),
                    // Whole, torn, or lost with or without the size.
                    Loss::Ordered | Loss::Any => match draw(4) {
                        0 => put(&mut content, *at, data, |_| true),
                        1 => put(&mut content, *at, data, |_| false),
                        2 => put(&mut content, *at, data, |_| draw(2) == 0),
                        _ => {}
                    },
                }
            }
            content
        };
        let (mut tree, mut open) = (Tree::new(), vec![(0, PathBuf::new())]);
        while let Some((folder, path)) = open.pop() {
            for ((_, name), &number) in entries.range((folder, String::new())..(folder + 1, String::new())) {
                let path = path.join(name);
                tree.insert(path.clone(), (!folders[number]).then(|| content(number)));
                if folders[number] {
                    open.push((number, path));
                }
            }
        }
        tree
    }
}

fn set(entries: &mut BTreeMap<(usize, String), usize>, (folder, name, to): (usize, String, Option<usize>)) {
    match to {
        Some(to) => entries.insert((folder, name), to),
        None => entries.remove(&(folder, name)),
    };
}

/// Writes data whose sectors are `kept`, others as zeros where the file was shorter; without data cuts the file.
fn put(content: &mut Vec<u8>, at: usize, data: Option<&[u8]>, mut kept: impl FnMut(usize) -> bool) {
    let Some(data) = data else { return content.resize(at, 0) };
    content.resize(content.len().max(at + data.len()), 0);
    let mut from = 0;
    while from < data.len() {
        let to = data.len().min((at + from) / SECTOR * SECTOR + SECTOR - at);
        if kept((at + from) / SECTOR) {
            content[at + from..at + to].copy_from_slice(&data[from..to]);
        }
        from = to;
    }
}

/// Makes the files of a tree in an empty folder.
pub fn write(tree: &Tree, folder: &Path) {
    for (path, content) in tree {
        let path = folder.join(path);
        match content {
            Some(content) => fs::write(path, content).unwrap(),
            None => fs::create_dir_all(path).unwrap(),
        }
    }
}
