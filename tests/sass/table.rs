//! The table of kernels (`kernels.jsonl`, a JSON object a line), and the comparison of a measured row with it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::assembly::WIDE_STORES;

/// A kernel as an operation launches it, assembled for one chip.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The operation, the function, its file, its short macros.
    pub op: String,
    pub entry: String,
    pub file: String,
    pub macros: String,
    /// Tells kernels apart whose long macros differ, in the order of their first launches.
    pub number: u64,
    pub arch: String,
    /// Threads and dynamic shared memory of a block.
    pub threads: u64,
    pub dynamic_shared: u64,
    /// The [hash](crate::code::hash) of the program. A program that has the same one as in the table is not assembled again.
    #[serde(default)]
    pub code: String,
    pub registers: u64,
    pub spill_bytes: u64,
    pub static_shared: u64,
    /// What a multiprocessor runs at a time, and what limits it.
    pub blocks: u64,
    pub warps: u64,
    pub limit: String,
    /// From here on: what `nvdisasm` shows. Absent where it is not installed.
    #[serde(flatten)]
    pub mix: Option<MixRow>,
}

/// The instructions of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MixRow {
    pub instructions: u64,
    pub classes: BTreeMap<String, u64>,
    /// The part of global accesses that moves 128 bits.
    pub wide_share: f64,
    /// `memory` or `tensor`; empty for a kernel that uses neither.
    pub peak_of: String,
    /// The share of that peak that the instructions allow, and what limits it.
    pub peak_share: f64,
    pub bound: String,
}

/// Kernels that may spill, as `(operation, function, why)`.
const SPILLS: [(&str, &str, &str); 0] = [];

impl Row {
    /// By what a row of the table is found.
    pub fn key(&self) -> String {
        let Row { op, entry, file, macros, number, arch, threads, dynamic_shared, .. } = self;
        format!("{arch} {op} {entry} ({file}) {macros} #{number}, {threads} threads, {dynamic_shared} bytes")
    }

    /// Why the row is worse than the table's; empty if it is not.
    pub fn worse_than(&self, known: &Row) -> Vec<String> {
        let mut why = Vec::new();
        let may_spill =
            SPILLS.iter().any(|(op, entry, _)| (*op, *entry) == (self.op.as_str(), self.entry.as_str()));
        if self.spill_bytes > 0 && !may_spill {
            why.push(format!(
                "spills {} bytes: reorder its formula, so that fewer numbers live at once",
                self.spill_bytes
            ));
        }
        if self.warps < known.warps {
            why.push(format!(
                "{} warps run on a multiprocessor (by {}: {} registers, {} bytes of static shared memory), wanted {} ({} registers, {} bytes)",
                self.warps, self.limit, self.registers, self.static_shared, known.warps, known.registers, known.static_shared
            ));
        }
        let (Some(mix), Some(wanted)) = (&self.mix, &known.mix) else { return why };
        if mix.wide_share < wanted.wide_share {
            why.push(format!(
                "{} of its global accesses move 128 bits, wanted {}",
                mix.wide_share, wanted.wide_share
            ));
        }
        let tensor = |mix: &MixRow| -> u64 {
            ["HMMA", "HGMMA", "DMMA"].iter().filter_map(|class| mix.classes.get(*class)).sum()
        };
        if tensor(mix) < tensor(wanted) {
            why.push(format!(
                "has {} tensor instructions (HMMA, HGMMA), wanted {}",
                tensor(mix),
                tensor(wanted)
            ));
        }
        let wide_stores = |mix: &MixRow| mix.classes.get(WIDE_STORES).copied().unwrap_or(0);
        if wide_stores(mix) < wide_stores(wanted) {
            why.push(format!(
                "has {} stores of 128 bits, wanted {}: packets are stored by `store_whole`",
                wide_stores(mix),
                wide_stores(wanted)
            ));
        }
        if mix.instructions as f64 > wanted.instructions as f64 * 1.02 {
            why.push(format!(
                "has {} instructions, wanted {} and at most 2 % more",
                mix.instructions, wanted.instructions
            ));
        }
        if mix.classes.get("LDL/STL") > wanted.classes.get("LDL/STL") {
            why.push("keeps numbers in local memory (LDL, STL)".into());
        }
        why
    }
}

/// Reads a table.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let rows = text.lines().enumerate().skip(1);
    rows.map(|(n, line)| serde_json::from_str(line).map_err(|e| format!("line {}: {e}", n + 1))).collect()
}

/// The first line of a table: which compiler it is of.
pub fn compiler_of(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_matches('"').to_string()
}

/// A table's text.
pub fn text(compiler: &str, rows: &[Row]) -> String {
    let line = |row: &Row| serde_json::to_string(row).unwrap_or_default();
    [format!("{compiler:?}")].into_iter().chain(rows.iter().map(line)).map(|line| line + "\n").collect()
}

/// What is wrong with rows beside the table's: worse ones, ones that it lacks, and ones that it alone has.
pub fn compare(rows: &[Row], table: &[Row]) -> Vec<String> {
    let known: BTreeMap<String, &Row> = table.iter().map(|row| (row.key(), row)).collect();
    let mut wrong = Vec::new();
    for row in rows {
        match known.get(&row.key()) {
            Some(known) => {
                wrong.extend(row.worse_than(known).iter().map(|why| format!("{}: {why}", row.key())))
            }
            None => {
                wrong.extend(
                    row.worse_than(&Row::default()).iter().map(|why| format!("{}: {why}", row.key())),
                );
                wrong.push(format!("{}: is not in the table", row.key()));
            }
        }
    }
    let now: std::collections::BTreeSet<String> = rows.iter().map(Row::key).collect();
    let gone = known.keys().filter(|key| !now.contains(*key));
    wrong.extend(gone.map(|key| format!("{key}: is in the table, and no step launches it")));
    wrong
}

/// Each kind of regression is found, and a better row is none.
pub fn test_of_comparison() -> Result<(), String> {
    let classes =
        |named: &[(&str, u64)]| named.iter().map(|&(name, count)| (name.to_string(), count)).collect();
    let mix = MixRow {
        instructions: 1000,
        classes: classes(&[("HMMA", 8), ("STG.128", 1)]),
        wide_share: 0.9,
        ..MixRow::default()
    };
    let known = Row {
        op: "op".into(),
        registers: 64,
        blocks: 8,
        warps: 32,
        mix: Some(mix.clone()),
        ..Row::default()
    };
    let with = |change: &dyn Fn(&mut Row)| {
        let mut row = known.clone();
        change(&mut row);
        compare(&[row], std::slice::from_ref(&known))
    };
    let with_mix = |mix: MixRow| with(&|row| row.mix = Some(mix.clone()));
    let cases = [
        (with(&|row| row.spill_bytes = 8), "spills 8 bytes"),
        (with(&|row| row.warps = 28), "28 warps run"),
        (with_mix(MixRow { wide_share: 0.8, ..mix.clone() }), "move 128 bits"),
        (with_mix(MixRow { classes: classes(&[("HMMA", 8)]), ..mix.clone() }), "stores of 128 bits"),
        (
            with_mix(MixRow { classes: classes(&[("STG.128", 1)]), ..mix.clone() }),
            "has 0 tensor instructions",
        ),
        (with_mix(MixRow { instructions: 1021, ..mix.clone() }), "1021 instructions"),
        (
            with_mix(MixRow {
                classes: classes(&[("HMMA", 8), ("LDL/STL", 1), ("STG.128", 1)]),
                ..mix.clone()
            }),
            "local memory",
        ),
        (compare(&[], std::slice::from_ref(&known)), "no step launches it"),
        (compare(std::slice::from_ref(&known), &[]), "is not in the table"),
    ];
    for (got, wanted) in cases {
        if got.len() != 1 || !got[0].contains(wanted) {
            return Err(format!("got {got:?}, wanted one about {wanted:?}"));
        }
    }
    let better = MixRow { instructions: 900, wide_share: 1.0, ..mix.clone() };
    let fine = [with(&|row| row.registers = 100), with(&|row| row.mix = None), with_mix(better)].concat();
    let again = parse(&text("V13", std::slice::from_ref(&known)))?;
    if fine.is_empty() && again == [known] { Ok(()) } else { Err(format!("{fine:?}, {again:?}")) }
}
