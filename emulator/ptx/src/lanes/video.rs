//! `vadd`, `vset`, `vadd4` and their like: parts of sources (words, halves, bytes) are picked, extended, joined,
//! saturated, and merged with a third source. What to do is packed into the fourth.

use super::{Map, map};

/// How parts of two sources are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    Add,
    Subtract,
    Difference,
    Minimum,
    Maximum,
    Average,
    ShiftLeft,
    ShiftRight,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
    Different,
}

const JOINS: [(&str, &str, Join); 14] = [
    ("add", "", Join::Add),
    ("sub", "", Join::Subtract),
    ("absdiff", "", Join::Difference),
    ("min", "", Join::Minimum),
    ("max", "", Join::Maximum),
    ("avrg", "", Join::Average),
    ("shl", "", Join::ShiftLeft),
    ("shr", "", Join::ShiftRight),
    ("set", "lt", Join::Less),
    ("set", "le", Join::LessOrEqual),
    ("set", "gt", Join::Greater),
    ("set", "ge", Join::GreaterOrEqual),
    ("set", "eq", Join::Equal),
    ("set", "ne", Join::Different),
];

/// The join of an instruction: `vadd2` without its `v` and number, and a comparison.
pub(crate) fn join(name: &str, comparison: &str) -> Option<Join> {
    let found = JOINS.iter().find(|(n, c, _)| *n == name && (*c == comparison || c.is_empty()));
    found.map(|(_, _, join)| *join)
}

/// What happens with the results and the third source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Parts that have no result are those of the third source.
    Parts,
    Add,
    Minimum,
    Maximum,
    /// The result is put in the place of one byte, or half, of the third source.
    Byte(u8),
    Half(u8),
}

/// An instruction of this family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Video {
    pub(crate) join: Join,
    pub(crate) merge: Merge,
    /// Bytes of a part.
    pub(crate) part: u8,
    /// Parts that have results, as bits.
    pub(crate) mask: u8,
    /// Whether A, B and the result are signed.
    pub(crate) signed: [bool; 3],
    pub(crate) saturate: bool,
    /// Of a shift: whether amounts wrap.
    pub(crate) wrap: bool,
    /// The parts picked for each result, of the eight bytes of A, then B, in units of a part.
    pub(crate) picked: [[u8; 4]; 2],
    /// Bytes of what is picked, which may be less than a part's.
    pub(crate) width: [u8; 2],
}

impl Video {
    /// The instruction in 64 bits.
    pub(crate) fn pack(self) -> u64 {
        let merge = match self.merge {
            Merge::Parts => 0,
            Merge::Add => 1,
            Merge::Minimum => 2,
            Merge::Maximum => 3,
            Merge::Byte(at) => 4 + at as u64,
            Merge::Half(at) => 8 + at as u64,
        };
        let flags = [self.signed[0], self.signed[1], self.signed[2], self.saturate, self.wrap];
        let flags = flags.iter().rev().fold(0, |bits, flag| bits << 1 | *flag as u64);
        let picked = self.picked.concat().iter().rev().fold(0, |bits, at| bits << 3 | *at as u64);
        let sizes = [self.part, self.width[0], self.width[1]].map(|size| size.ilog2() as u64);
        let sizes = sizes[0] | sizes[1] << 2 | sizes[2] << 4;
        self.join as u64 | merge << 4 | (self.mask as u64) << 8 | flags << 12 | sizes << 17 | picked << 23
    }

    fn unpack(bits: u64) -> Video {
        let merge = (bits >> 4 & 15) as u8;
        let flag = |at: u32| bits >> (12 + at) & 1 == 1;
        let size = |at: u32| 1u8 << (bits >> (17 + 2 * at) & 3);
        Video {
            join: JOINS[(bits & 15) as usize].2,
            merge: match merge {
                1 => Merge::Add,
                2 => Merge::Minimum,
                3 => Merge::Maximum,
                4..8 => Merge::Byte(merge - 4),
                8..10 => Merge::Half(merge - 8),
                _ => Merge::Parts,
            },
            part: size(0),
            mask: (bits >> 8 & 15) as u8,
            signed: [flag(0), flag(1), flag(2)],
            saturate: flag(3),
            wrap: flag(4),
            picked: [0, 1].map(|s| [0, 1, 2, 3].map(|at| (bits >> (23 + 3 * (4 * s + at)) & 7) as u8)),
            width: [size(1), size(2)],
        }
    }

    /// The part of a source that result `at` is made of.
    fn part_of(&self, source: usize, both: u64, at: usize) -> i64 {
        let (width, place) = (self.width[source] as u32 * 8, self.picked[source][at] as u32);
        let up = 64 - width;
        let bits = both >> (place * width) << up;
        if self.signed[source] { bits as i64 >> up } else { (bits >> up) as i64 }
    }

    fn joined(&self, a: i64, b: i64) -> i64 {
        let amount = if self.wrap { b & 31 } else { b.clamp(0, 32) };
        match self.join {
            Join::Add => a + b,
            Join::Subtract => a - b,
            Join::Difference => (a - b).abs(),
            Join::Minimum => a.min(b),
            Join::Maximum => a.max(b),
            // Halves are rounded away from zero.
            Join::Average => (a + b + (a + b >= 0) as i64) >> 1,
            Join::ShiftLeft => a << amount,
            Join::ShiftRight => a >> amount,
            Join::Less => (a < b) as i64,
            Join::LessOrEqual => (a <= b) as i64,
            Join::Greater => (a > b) as i64,
            Join::GreaterOrEqual => (a >= b) as i64,
            Join::Equal => (a == b) as i64,
            Join::Different => (a != b) as i64,
        }
    }

    /// A result as a part: its low bits, or the nearest value that a part has.
    fn saturated(&self, value: i64, bits: u32) -> i64 {
        match (self.saturate, self.signed[2]) {
            (false, _) => value,
            (true, false) => value.clamp(0, (1 << bits) - 1),
            (true, true) => value.clamp(-1 << (bits - 1), (1 << (bits - 1)) - 1),
        }
    }

    fn run(&self, a: u32, b: u32, c: u32) -> u32 {
        let both = (b as u64) << 32 | a as u64;
        let bits = match self.merge {
            Merge::Byte(_) => 8,
            Merge::Half(_) => 16,
            _ => self.part as u32 * 8,
        };
        let low = u32::MAX >> (32 - bits);
        let wide = |x: u32| if self.signed[2] { x as i32 as i64 } else { x as i64 };
        let parts = (0..4 / self.part as usize).filter(|at| self.mask >> at & 1 == 1);
        let results = parts.map(|at| {
            let joined = self.joined(self.part_of(0, both, at), self.part_of(1, both, at));
            (at as u32 * bits, self.saturated(joined, bits))
        });
        match self.merge {
            Merge::Parts => {
                results.fold(c, |word, (at, value)| word & !(low << at) | (value as u32 & low) << at)
            }
            Merge::Add => results.fold(c, |sum, (_, value)| sum.wrapping_add(value as u32)),
            Merge::Minimum => results.fold(c, |least, (_, value)| wide(least).min(wide(value as u32)) as u32),
            Merge::Maximum => results.fold(c, |most, (_, value)| wide(most).max(wide(value as u32)) as u32),
            Merge::Byte(at) | Merge::Half(at) => results.fold(c, |word, (_, value)| {
                let at = at as u32 * bits;
                word & !(low << at) | (value as u32 & low) << at
            }),
        }
    }
}

/// The map of all instructions of this family: the fourth source says which.
pub(crate) fn video() -> Map {
    map!((a: u32, b: u32, c: u32, e: u64) -> u32 { Video::unpack(e).run(a, b, c) })
}
