//! [`Program`]: CUDA sources. [`KernelSource`]: one kernel of them. [`Target`] and [`Image`]: what a program is compiled for, and the result.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::library::emulated;

/// The source of one or more kernels.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Its name, for messages and the cache.
    pub name: &'a str,
    /// Files, as `(name, text)`, one after the other: lines in messages are theirs.
    pub files: &'static [(&'static str, &'static str)],
    /// Macros: name and text. A program is compiled once for each set of them.
    pub defines: &'a [(&'a str, &'a str)],
}

impl Program<'_> {
    /// The text that is compiled.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in self.defines {
            text += &format!("#define {name} {value}\n");
        }
        for (name, file) in self.files {
            text += &format!("#line 1 \"{name}\"\n{file}\n");
        }
        text
    }

    /// One of its kernels.
    pub(crate) fn kernel(&self, entry: &str) -> KernelSource {
        let own = |(name, value): &(&str, &str)| ((*name).to_string(), (*value).to_string());
        let defines = self.defines.iter().map(own).collect();
        KernelSource { program: self.name.into(), files: self.files, defines, entry: entry.into() }
    }

    /// A hash of everything by which two programs can differ; files count by their address in this binary.
    pub(crate) fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (_, file) in self.files {
            (file.as_ptr().addr(), file.len()).hash(&mut hasher);
        }
        self.defines.hash(&mut hasher);
        hasher.finish()
    }
}

/// A kernel: a function of a program.
#[derive(Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// The program's name.
    pub program: String,
    /// The program's files.
    pub files: &'static [(&'static str, &'static str)],
    /// The program's macros.
    pub defines: Vec<(String, String)>,
    /// The function's name.
    pub entry: String,
}

impl KernelSource {
    /// The text of the whole program.
    pub fn text(&self) -> String {
        let defines: Vec<(&str, &str)> = self.defines.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        Program { name: &self.program, files: self.files, defines: &defines }.text()
    }

    /// The short macros, such as `ELEMENT=bf16 TEAM=32 PACKETS=3`.
    pub fn macros(&self) -> String {
        let short = self.defines.iter().filter(|(_, value)| value.len() <= SHORT);
        short.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }
}

/// Characters of a macro that is part of a kernel's name. A longer one is a formula, which the operation's name stands for.
const SHORT: usize = 16;

/// The function, its file, and its short macros: `rows (softmax.cu) ELEMENT=bf16 TEAM=32 PACKETS=3`.
impl fmt::Display for KernelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) {}", self.entry, self.program, self.macros())
    }
}

/// What a program is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Machine code (CUBIN) of a compute capability, such as `Cubin(90)`: assembled, so that inline PTX is checked too.
    Cubin(u32),
    /// PTX of a compute capability: what the emulator runs.
    Ptx(u32),
}

impl Target {
    /// The target of a device of this compute capability.
    pub(crate) fn of((major, minor): (u32, u32)) -> Target {
        let capability = major * 10 + minor;
        if emulated() { Target::Ptx(capability) } else { Target::Cubin(capability) }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // From 9.0 on the suffix gives the instructions of this very architecture.
        let suffix = |capability| if capability >= 90 { "a" } else { "" };
        match *self {
            Target::Cubin(c) => write!(f, "sm_{c}{}", suffix(c)),
            Target::Ptx(c) => write!(f, "compute_{c}{}", suffix(c)),
        }
    }
}

/// A compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// PTX, with a 0 at its end, or a CUBIN.
    pub code: Vec<u8>,
    /// What the compiler says of it: of a CUBIN, the registers and spills of each kernel.
    pub log: String,
}
