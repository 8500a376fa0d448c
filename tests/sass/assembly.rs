//! What a kernel's assembly says: registers and memory from the assembler's log, instructions from `nvdisasm`.
//!
//! **Weights.** An instruction inside n loops counts 8^n times (n up to 4). A loop that only waits for another thread counts once. Of a
//! kernel of warpgroups, loops that copy tiles and do not multiply are those of one warp, where eight multiply: they count an eighth. Of a
//! kernel with 128-bit accesses, the peak's model leaves out the basic blocks whose global accesses are all narrower: ends of rows, and
//! rows that do not begin at a multiple of 16 bytes.
//!
//! **The share of the peak** that the instructions allow. One pass of a multiprocessor over the weighted instructions of a warp takes
//! at least, in cycles, the largest of
//!
//! ```text
//! issue     instructions / 4                      four schedulers
//! integer   ALU instructions / 2                  64 lanes
//! special   2 x (MUFU and conversions)            16 lanes
//! double    32 lanes / lanes of the chip
//! shared    bytes of LDS, STS, LDSM / 128
//! tensor    HMMA's operations / what mma.sync reaches; HGMMA's / the peak
//! memory    bytes of global accesses / bytes that the memory moves in a cycle, by multiprocessor
//! latency   memory x bytes that must be in flight / bytes of loads in flight at the occupancy, if those are too few
//! ```
//!
//! The share is `memory` (of kernels with tensor instructions: the operations / the peak) divided by that. It is a bound by the
//! instructions alone. It knows nothing of caches, bank conflicts and dependences. It counts both sides of every branch, so a kernel that
//! chooses its way while it runs (strides, large angles) allows more than its share says.

use std::collections::{BTreeMap, BTreeSet};

use crate::flow::{Instruction, instructions};

/// The chips that kernels are assembled for.
pub struct Chip {
    pub arch: &'static str,
    pub capability: u32,
    /// Shared memory of a multiprocessor, of which each block's own takes 1024 bytes more.
    pub shared_bytes: u64,
    /// Bytes that the memory moves in a cycle, for each multiprocessor.
    bytes_a_cycle: f64,
    /// 16-bit operations of tensor cores in a cycle of a multiprocessor.
    tensor_flops: f64,
    /// The part of them that `mma.sync` reaches.
    mma_sync: f64,
    /// Lanes for f64.
    double_lanes: f64,
}

/// A100: 108 multiprocessors at 1.41 GHz, 2.04 TB/s. H100 SXM: 132 at 1.755 GHz, 3.35 TB/s.
pub const CHIPS: [Chip; 2] = [
    Chip {
        arch: "sm_80",
        capability: 80,
        shared_bytes: 164 << 10,
        bytes_a_cycle: 13.4,
        tensor_flops: 2048.0,
        mma_sync: 1.0,
        double_lanes: 32.0,
    },
    Chip {
        arch: "sm_90a",
        capability: 90,
        shared_bytes: 228 << 10,
        bytes_a_cycle: 14.5,
        tensor_flops: 4096.0,
        mma_sync: 0.62,
        double_lanes: 64.0,
    },
];

const REGISTERS: u64 = 65536;
const WARPS_MAX: u64 = 64;
const BLOCKS_MAX: u64 = 32;
/// Cycles from a load to its value.
const LATENCY_CYCLES: f64 = 800.0;

/// What the assembler says of a kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    pub registers: u64,
    pub spill_bytes: u64,
    pub static_shared: u64,
}

/// Reads the part of the assembler's log (`--ptxas-options=-v`) about a kernel.
pub fn resources(log: &str, entry: &str) -> Option<Resources> {
    let (_, part) = log.split_once(&format!("Compiling entry function '{entry}'"))?;
    let part = part.split("Compiling entry function").next()?;
    let before = |what: &str| -> Vec<u64> {
        let digits = |text: &str| text.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        let mut pieces: Vec<&str> = part.split(what).collect();
        pieces.pop();
        pieces.into_iter().filter_map(digits).collect()
    };
    Some(Resources {
        registers: *before(" registers").first()?,
        spill_bytes: before(" bytes spill").iter().sum(),
        static_shared: before(" bytes smem").iter().sum(),
    })
}

/// The blocks that a multiprocessor runs at a time, and what limits them.
pub fn occupancy(chip: &Chip, found: &Resources, threads: u64, dynamic_shared: u64) -> (u64, &'static str) {
    let warps = threads.div_ceil(32).max(1);
    // Registers are dealt out to a warp in units of 256, to each of the four schedulers alike.
    let of_warp = (found.registers * 32).next_multiple_of(256).max(256);
    let shared = (found.static_shared + dynamic_shared + 1024).next_multiple_of(128);
    let limits = [
        (REGISTERS / of_warp / 4 * 4 / warps, "registers"),
        (chip.shared_bytes / shared, "shared memory"),
        (WARPS_MAX / warps, "threads"),
        (BLOCKS_MAX, "blocks"),
    ];
    limits.into_iter().min_by_key(|&(blocks, _)| blocks).unwrap_or_default()
}

/// What a kernel's instructions say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mix {
    pub instructions: u64,
    /// Of the classes that are told apart ([`CLASSES`]).
    pub classes: BTreeMap<&'static str, u64>,
    /// The part of global accesses, weighted, that moves 128 bits.
    pub wide_share: f64,
    /// What the peak is one of, and the share of it. None without global accesses.
    pub peak: Option<(&'static str, f64)>,
    /// What limits the share.
    pub bound: &'static str,
}

/// Classes by the beginnings of their instructions' names.
const CLASSES: [(&str, &[&str]); 11] = [
    ("HMMA", &["HMMA"]),
    ("HGMMA", &["HGMMA"]),
    ("DMMA", &["DMMA"]),
    ("LDGSTS", &["LDGSTS"]),
    ("UTMALDG", &["UTMALDG", "UBLKCP"]),
    ("LDSM", &["LDSM"]),
    ("MUFU", &["MUFU"]),
    ("BAR", &["BAR"]),
    ("LDL/STL", &["LDL", "STL"]),
    ("LDG", &["LDG."]),
    ("STG", &["STG"]),
];

/// Those of `STG` that move 128 bits.
pub const WIDE_STORES: &str = "STG.128";

/// Integer instructions of the ALU.
const ALU: [&str; 14] = [
    "IADD", "VIADD", "LOP", "SHF", "PRMT", "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "VIMNMX", "LEA", "PLOP",
    "POPC",
];

impl Instruction {
    fn is(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.name.starts_with(name))
    }

    fn weight(&self) -> f64 {
        self.share * 8f64.powi(self.loops.len().min(4) as i32)
    }

    fn is_global(&self) -> bool {
        self.is(&["LDG.", "STG", "LDGSTS", "RED", "ATOMG"])
    }

    fn is_wide(&self) -> bool {
        self.is_global() && self.bytes() >= 512.0
    }

    /// Bytes that a warp moves with it.
    fn bytes(&self) -> f64 {
        let has = |suffix: &str| self.name.split('.').any(|part| part == suffix);
        let lane = match () {
            () if self.is(&["LDSM"]) => {
                [("4", 16.0), ("2", 8.0)].into_iter().find(|(n, _)| has(n)).map_or(4.0, |(_, bytes)| bytes)
            }
            () if has("128") => 16.0,
            () if has("64") => 8.0,
            () if has("U16") || has("S16") => 2.0,
            () if has("U8") || has("S8") => 1.0,
            () => 4.0,
        };
        32.0 * lane
    }

    /// Operations of a tensor instruction, of one warp: `16816` is m 16, n 8, k 16; `64x128x16` is a warp group's.
    fn tensor_flops(&self) -> f64 {
        let shape = self.name.split('.').nth(1).unwrap_or_default();
        match shape {
            "16816" => 4096.0,
            "1688" => 2048.0,
            _ => shape.split('x').filter_map(|n| n.parse::<f64>().ok()).product::<f64>() * 2.0 / 4.0,
        }
    }
}

/// The most exponentials that follow each other while a product of warpgroups is under way: after its start, and before all are waited for.
pub fn exponentials_beside_products(text: &str, entry: &str) -> usize {
    let section = format!("\t.section\t.text.{entry},");
    let body = text.split_once(&section).map_or("", |(_, rest)| rest);
    let (mut most, mut count) = (0, None);
    for line in body.split("\t.section\t").next().unwrap_or_default().lines() {
        if line.contains("HGMMA") {
            count = Some(0);
        } else if line.contains("WARPGROUP.DEPBAR") && line.contains(", 0x0") {
            count = None;
        } else if line.contains("MUFU.EX2") {
            count = count.map(|n| n + 1);
            most = most.max(count.unwrap_or(0));
        }
    }
    most
}

/// The mix of a kernel's instructions, with so many warps on a multiprocessor.
pub fn mix(chip: &Chip, text: &str, entry: &str, warps: u64) -> Mix {
    let all = instructions(text, entry);
    let count = |names: &[&str]| all.iter().filter(|i| i.is(names)).count() as u64;
    // A packet may be loaded at once and stored an element at a time, which takes eight times as many requests.
    let wide_stores = all.iter().filter(|i| i.is(&["STG"]) && i.is_wide()).count() as u64;
    let classes =
        CLASSES.iter().map(|(class, names)| (*class, count(names))).chain([(WIDE_STORES, wide_stores)]);
    let weight = |wanted: fn(&Instruction) -> bool| -> f64 {
        all.iter().filter(|i| wanted(i)).map(Instruction::weight).sum()
    };
    let (global, wide) = (weight(Instruction::is_global), weight(Instruction::is_wide));
    let (peak, bound) = peak(chip, &all, warps);
    Mix {
        instructions: all.len() as u64,
        classes: classes.filter(|&(_, count)| count > 0).collect(),
        wide_share: if global > 0.0 { rounded(wide / global) } else { 1.0 },
        peak,
        bound,
    }
}

/// The instructions that the peak's model counts.
fn counted(all: &[Instruction]) -> Vec<&Instruction> {
    let blocks = |wanted: fn(&Instruction) -> bool| -> BTreeSet<usize> {
        all.iter().filter(|i| wanted(i)).map(|i| i.block).collect()
    };
    let (global, wide) = (blocks(Instruction::is_global), blocks(Instruction::is_wide));
    let is_narrow = |block: usize| !wide.is_empty() && global.contains(&block) && !wide.contains(&block);
    all.iter().filter(|i| !is_narrow(i.block)).collect()
}

/// The share of the peak, by the model at the top of this file, and what limits it.
fn peak(chip: &Chip, all: &[Instruction], warps: u64) -> (Option<(&'static str, f64)>, &'static str) {
    let all = counted(all);
    let weighed = |f: &dyn Fn(&Instruction) -> f64| all.iter().map(|i| i.weight() * f(i)).sum::<f64>();
    let count = |names: &[&str]| weighed(&|i| f64::from(i.is(names)));
    let memory = weighed(&|i| if i.is_global() { i.bytes() } else { 0.0 }) / chip.bytes_a_cycle;
    // Of the loop, or of the code outside of loops, whose loads bring the most.
    let mut together: BTreeMap<Option<usize>, f64> = BTreeMap::new();
    for load in all.iter().filter(|i| i.is(&["LDG.", "LDGSTS"])) {
        *together.entry(load.loops.last().copied()).or_default() += load.bytes();
    }
    let in_flight = together.values().copied().reduce(f64::max).map(|bytes| bytes * warps as f64);
    let late = in_flight.map_or(1.0, |bytes| (chip.bytes_a_cycle * LATENCY_CYCLES / bytes).max(1.0));
    let of =
        |names: &[&str]| weighed(&|i| if i.is(names) { i.tensor_flops() } else { 0.0 }) / chip.tensor_flops;
    let (mma, wgmma) = (of(&["HMMA"]), of(&["HGMMA"]));
    let (what, peak) = if mma + wgmma > 0.0 { ("tensor", mma + wgmma) } else { ("memory", memory) };
    let mut limits = vec![
        ("issue", weighed(&|_| 1.0) / 4.0),
        ("integer", count(&ALU) / 2.0),
        ("special", 2.0 * count(&["MUFU", "F2F.", "F2I", "I2F."])),
        ("double", count(&["DFMA", "DADD", "DMUL", "DSETP"]) * 32.0 / chip.double_lanes),
        ("shared", weighed(&|i| if i.is(&["LDS", "STS"]) { i.bytes() } else { 0.0 }) / 128.0),
        ("tensor", mma / chip.mma_sync + wgmma),
    ];
    // Of tensor kernels the memory's time hides behind products that share what is loaded.
    if what == "memory" {
        limits.extend([("memory", memory), ("latency", memory * late)]);
    }
    let (bound, cycles) =
        limits.into_iter().fold(("", 0.0), |worst, limit| if limit.1 > worst.1 { limit } else { worst });
    ((peak > 0.0).then(|| (what, rounded(peak / cycles))), bound)
}

/// To a thousandth, as tables have it, and without a sign at 0.
fn rounded(share: f64) -> f64 {
    (share * 1000.0).round() / 1000.0 + 0.0
}

/// Widths, classes and the share of the peak of a text like `nvdisasm`'s.
pub fn test_of_a_mix() -> Result<(), String> {
    let text = "\t.section\t.text.k,\"ax\"\n        /*0000*/   LDG.E.128 R4, desc[UR6][R6.64] ;\n\
        /*0010*/   HMMA.16816.F32 R4, R8, R9, R4 ;\n        /*0020*/   STG.E.U16 desc[UR6][R6.64], R0 ;\n        /*0030*/   EXIT ;\n";
    let found = mix(&CHIPS[1], text, "k", 64);
    let share = found.peak.ok_or("no peak")?;
    let fine = found.wide_share == 0.5 && found.classes["HMMA"] == 1 && share == ("tensor", 0.62);
    if fine { Ok(()) } else { Err(format!("got {found:?}")) }
}

/// Occupancies that NVIDIA's calculator gives.
pub fn test_of_occupancy() -> Result<(), String> {
    let of = |registers, static_shared, threads, dynamic| {
        let found = Resources { registers, static_shared, spill_bytes: 0 };
        occupancy(&CHIPS[1], &found, threads, dynamic)
    };
    let got = [
        of(32, 0, 256, 0),
        of(168, 0, 128, 0),
        of(33, 0, 1024, 0),
        of(64, 0, 128, 100 << 10),
        of(16, 0, 32, 0),
    ];
    let wanted = [(8, "registers"), (3, "registers"), (1, "registers"), (2, "shared memory"), (32, "blocks")];
    if got == wanted { Ok(()) } else { Err(format!("got {got:?}, wanted {wanted:?}")) }
}
