//! A kernel of the suite: its source, its launch, the values that it must leave, and what is wrong with its variants.
//!
//! The source is CUDA C++ with marks at the ends of lines. A line with `//- name` is left out in the variant `name`, one with
//! `//+ name` is in that variant alone, and the report of a variant must name the lines with `//! name`. A mark may have several names.

use phalanx_ptx::{FaultKind, Fill, Swizzle, TensorMap, TensorType};

/// A kernel with its variants.
pub struct Case {
    pub name: &'static str,
    source: &'static str,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub cluster: u32,
    pub shared_bytes: u32,
    /// What its last parameter describes, if it has one more.
    pub map: Option<Map>,
    /// The words at `x`; their number is `n`.
    pub x: Vec<i32>,
    /// The words at `y`, and whether they are zeros at first or unwritten.
    pub y: usize,
    pub zeros: bool,
    /// The first words at `y` after the kernel.
    pub result: Vec<i32>,
    /// Whether threads must not skip a barrier by exiting.
    pub strict: bool,
    /// How many instructions without progress mean that there is no way on.
    pub patience: u64,
    /// What the kernel as it stands must not lose.
    pub within: Vec<Cost>,
    pub variants: Vec<(&'static str, Must)>,
}

/// A tensor map over the words at `x` or `y`, which lie together. Sides are innermost first.
#[derive(Clone, Copy)]
pub struct Map {
    pub of: Of,
    pub kind: TensorType,
    pub sides: &'static [u64],
    pub window: &'static [u32],
    pub swizzle: Swizzle,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    X,
    Y,
}

impl Map {
    /// The bytes of the map with the tensor at an address.
    pub fn at(&self, address: u64) -> [u8; 128] {
        let strides = self.sides.iter().scan(self.kind.bytes(), |bytes, side| {
            *bytes *= side;
            Some(*bytes)
        });
        let map = TensorMap {
            kind: self.kind,
            address,
            sides: self.sides.to_vec(),
            strides: strides.take(self.sides.len() - 1).collect(),
            window: self.window.to_vec(),
            steps: vec![1; self.sides.len()],
            swizzle: self.swizzle,
            fill: Fill::Zero,
        };
        map.encode().unwrap_or_else(|e| panic!("{e}"))
    }
}

/// What a kernel can lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Sectors of global memory that it touches beside those that it needs.
    Sectors,
    /// Bank conflicts of shared memory.
    Banks,
    /// Registers that are spilled.
    Registers,
}

/// What the emulator must say.
#[derive(Clone)]
pub enum Must {
    /// Nothing, and the result is right.
    Pass,
    /// A fault, under every order of threads: the kinds that it may be, which a mistake's order decides, and texts of the report.
    Fault(Vec<FaultKind>, &'static [&'static str]),
    /// A fault under at least one order; under the others nothing, whatever the result.
    FaultInSomeOrder(Vec<FaultKind>, &'static [&'static str]),
    /// A wrong result, or one that has unwritten bytes, under at least one order, and no fault.
    WrongResult,
    /// Allocations of the kernel are left, and nothing else is wrong.
    Leak,
    /// Nothing is wrong, but one cost is too high.
    Costs(Cost),
    /// Nothing under any order, though it is wrong: why the emulator does not find it.
    Missed(&'static str),
}

/// The words at `x` of a kernel that does not say others.
fn numbers(n: usize) -> Vec<i32> {
    (0..n as i32).map(|i| (37 * i + 11) % 101).collect()
}

impl Case {
    /// A kernel over 256 words, in so many blocks of so many threads.
    pub fn new(name: &'static str, grid: u32, block: u32, source: &'static str) -> Case {
        Case {
            name,
            source: source.trim_start_matches('\n'),
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            cluster: 1,
            shared_bytes: 0,
            map: None,
            x: numbers(256),
            y: 256,
            zeros: false,
            result: Vec::new(),
            strict: false,
            patience: 1 << 20,
            within: Vec::new(),
            variants: Vec::new(),
        }
    }

    pub fn block(mut self, x: u32, y: u32) -> Case {
        self.block = [x, y, 1];
        self
    }

    pub fn cluster(mut self, blocks: u32) -> Case {
        self.cluster = blocks;
        self
    }

    pub fn shared(mut self, bytes: u32) -> Case {
        self.shared_bytes = bytes;
        self
    }

    /// Its last parameter is a tensor map.
    pub fn map(mut self, map: Map) -> Case {
        self.map = Some(map);
        self
    }

    pub fn input(mut self, x: Vec<i32>) -> Case {
        self.x = x;
        self
    }

    /// So many words at `y`.
    pub fn output(mut self, words: usize) -> Case {
        self.y = words;
        self
    }

    /// What lies at `y` is zero at first.
    pub fn zeros(mut self) -> Case {
        self.zeros = true;
        self
    }

    pub fn strict(mut self) -> Case {
        self.strict = true;
        self
    }

    /// Threads test barriers in memory, each of which counts for many instructions.
    pub fn patient(mut self) -> Case {
        self.patience = 1 << 24;
        self
    }

    /// The words that the kernel leaves at `y`, of those at `x`.
    pub fn gives(mut self, result: impl Fn(&[i32]) -> Vec<i32>) -> Case {
        self.result = result(&self.x);
        assert!(self.result.len() <= self.y, "{}: more results than words", self.name);
        self
    }

    fn with(mut self, variant: &'static str, must: Must) -> Case {
        self.variants.push((variant, must));
        self
    }

    /// A variant that is found under every order, with these pieces of text in the report.
    pub fn wrong(self, variant: &'static str, kind: FaultKind, texts: &'static [&'static str]) -> Case {
        self.with(variant, Must::Fault(vec![kind], texts))
    }

    /// A variant that is found under some orders.
    pub fn sometimes(self, variant: &'static str, kind: FaultKind, texts: &'static [&'static str]) -> Case {
        self.with(variant, Must::FaultInSomeOrder(vec![kind], texts))
    }

    /// The last variant's fault may be of this kind too, with another report.
    pub fn or(mut self, kind: FaultKind) -> Case {
        if let Some((_, Must::Fault(kinds, _) | Must::FaultInSomeOrder(kinds, _))) = self.variants.last_mut()
        {
            kinds.push(kind);
        }
        self
    }

    /// A variant whose values are wrong under some order.
    pub fn values(self, variant: &'static str) -> Case {
        self.with(variant, Must::WrongResult)
    }

    /// The kernel as it stands must not have these costs.
    pub fn within(mut self, costs: &[Cost]) -> Case {
        self.within = costs.to_vec();
        self
    }

    /// A variant that is right, and costs too much.
    pub fn costs(self, variant: &'static str, cost: Cost) -> Case {
        self.with(variant, Must::Costs(cost))
    }

    /// A variant that leaves memory of the heap.
    pub fn leaks(self, variant: &'static str) -> Case {
        self.with(variant, Must::Leak)
    }

    /// A variant that is right too.
    pub fn also(self, variant: &'static str) -> Case {
        self.with(variant, Must::Pass)
    }

    /// A variant that is wrong and is not found.
    pub fn missed(self, variant: &'static str, why: &'static str) -> Case {
        self.with(variant, Must::Missed(why))
    }

    /// The kernel as it stands under the name `""`, then its variants.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Must)> {
        std::iter::once(("", &Must::Pass)).chain(self.variants.iter().map(|(name, must)| (*name, must)))
    }

    /// The name of a variant's kernel.
    pub fn kernel(&self, variant: &str) -> String {
        if variant.is_empty() { self.name.into() } else { format!("{}_{variant}", self.name) }
    }

    /// The text of a variant, with the lines of the source.
    pub fn text(&self, variant: &str) -> String {
        let kernel = self.kernel(variant);
        let (plain, named) =
            (format!(" {}(int *x, int *y, int n", self.name), format!(" {kernel}(int *x, int *y, int n"));
        let mut text = format!("namespace at_{kernel} {{\n#line 1 \"{}.cu\"\n", self.name);
        for line in self.source.lines() {
            let (code, marks) = marks(line);
            let is = |sign: char| marks.iter().any(|(s, name)| *s == sign && *name == variant);
            let only = marks.iter().any(|(sign, _)| *sign == '+');
            if !is('-') && (!only || is('+')) {
                let code = code.replace(&plain, &named);
                text += &if code.contains(&named) { format!("extern \"C\" {code}") } else { code };
            }
            text.push('\n');
        }
        text + "}\n"
    }

    /// Where the report of a variant must be.
    pub fn lines(&self, variant: &str) -> Vec<String> {
        let named =
            self.source.lines().enumerate().filter(|(_, line)| marks(line).1.contains(&('!', variant)));
        named.map(|(number, _)| format!("{}.cu:{}", self.name, number + 1)).collect()
    }

    /// Every name of a mark is a variant's.
    pub fn check_marks(&self) -> Result<(), String> {
        let known = |name: &str| self.variants.iter().any(|(variant, _)| *variant == name);
        let unknown = self.source.lines().flat_map(|line| marks(line).1).find(|(_, name)| !known(name));
        match unknown {
            Some((sign, name)) => Err(format!("{}: the mark //{sign} {name} is of no variant", self.name)),
            None => Ok(()),
        }
    }
}

/// A line without its marks, and these: the sign and a variant's name.
fn marks(line: &str) -> (&str, Vec<(char, &str)>) {
    let at = ["//-", "//+", "//!"].iter().filter_map(|sign| line.find(sign)).min().unwrap_or(line.len());
    let mut found = Vec::new();
    for mark in line[at..].split("//").filter(|mark| !mark.is_empty()) {
        let (sign, names) = mark.split_at(1);
        let sign = sign.chars().next().unwrap_or(' ');
        found.extend(names.split_whitespace().map(|name| (sign, name)));
    }
    (&line[..at], found)
}
