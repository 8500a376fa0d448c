//! The instructions of a kernel in `nvdisasm`'s text, and the loops that they are in.

use std::collections::{BTreeMap, BTreeSet};

/// Of each warp that copies for them, in our kernels of warpgroups.
const MULTIPLYING_WARPS: f64 = 8.0;

/// An instruction: its name with all suffixes, and where it is.
#[derive(Debug, PartialEq)]
pub struct Instruction {
    pub name: String,
    /// The loops around it, by number, the outermost first.
    pub loops: Vec<usize>,
    /// Its basic block.
    pub block: usize,
    /// How often it counts for each time that a warp executes it.
    pub share: f64,
}

/// A basic block: its instructions' names, and the blocks that may follow it.
#[derive(Default)]
struct Block {
    names: Vec<String>,
    next: BTreeSet<usize>,
}

/// The instructions of a kernel.
pub fn instructions(text: &str, entry: &str) -> Vec<Instruction> {
    let section = format!("\t.section\t.text.{entry},");
    let body = text.split_once(&section).map_or("", |(_, rest)| rest);
    let blocks = blocks(body.split("\t.section\t").next().unwrap_or_default());
    let has = |body: &BTreeSet<usize>, text: &str| {
        body.iter().any(|&block| blocks[block].names.iter().any(|name| name.contains(text)))
    };
    // A block that tries until another thread is done counts once, and the end of a kernel is a branch to itself.
    let counts = |body: &BTreeSet<usize>| {
        let names = body.iter().map(|&block| blocks[block].names.len());
        body.len() > 1 || names.sum::<usize>() > 1 && !has(body, ".TRY")
    };
    let loops: Vec<_> = loops(&blocks).into_iter().filter(counts).collect();
    let multiplies = has(&(0..blocks.len()).collect(), "HGMMA");
    let copies = |body: &BTreeSet<usize>| multiplies && has(body, "UTMALDG") && !has(body, "HGMMA");
    let mut all = Vec::new();
    for (block, Block { names, .. }) in blocks.iter().enumerate() {
        let around: Vec<usize> = (0..loops.len()).filter(|&number| loops[number].contains(&block)).collect();
        let of_one = around.iter().any(|&number| copies(&loops[number]));
        let share = if of_one { 1.0 / MULTIPLYING_WARPS } else { 1.0 };
        let instruction =
            |name: &String| Instruction { name: name.clone(), loops: around.clone(), block, share };
        all.extend(names.iter().map(instruction));
    }
    all
}

/// The basic blocks of a kernel's text, in its order.
fn blocks(body: &str) -> Vec<Block> {
    let (mut blocks, mut labels, mut branches) = (vec![Block::default()], BTreeMap::new(), BTreeMap::new());
    for line in body.lines().map(str::trim) {
        let last = blocks.len() - 1;
        if let Some(label) = line.strip_suffix(':') {
            let is_new = !blocks[last].names.is_empty();
            blocks.extend(is_new.then(Block::default));
            labels.insert(label, blocks.len() - 1);
        }
        let Some((_, code)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else {
            continue;
        };
        let words = code.trim().trim_end_matches(';').trim_end();
        let guarded = words.strip_prefix('@').and_then(|rest| rest.split_once(' '));
        let words = guarded.map_or(words, |(_, rest)| rest);
        let (name, operands) = words.split_once(' ').unwrap_or((words, ""));
        if name == "NOP" || name.is_empty() {
            continue;
        }
        blocks[last].names.push(name.to_string());
        let jumps = name.starts_with("BRA");
        if jumps || ["EXIT", "RET"].iter().any(|end| name.starts_with(end)) {
            let (condition, target) = operands.split_once("`(").unwrap_or((operands, ""));
            let goes_on = guarded.is_some() || jumps && !condition.trim().is_empty();
            branches.insert(last, (target.trim_end_matches(')'), goes_on));
            blocks.push(Block::default());
        }
    }
    for number in 0..blocks.len() {
        let (target, goes_on) = branches.get(&number).copied().unwrap_or(("", true));
        let behind = (goes_on && number + 1 < blocks.len()).then_some(number + 1);
        blocks[number].next.extend(behind.into_iter().chain(labels.get(target).copied()));
    }
    blocks
}

/// The blocks of each loop, the largest first: of those branches that go back to a block through which they were reached, what can get
/// from that block to the branch. (Code that is put behind a kernel, such as that of a barrier's second test, comes back by a branch that
/// is no loop.)
fn loops(blocks: &[Block]) -> Vec<BTreeSet<usize>> {
    let mut before = vec![Vec::new(); blocks.len()];
    for (number, block) in blocks.iter().enumerate() {
        block.next.iter().for_each(|&next| before[next].push(number));
    }
    let (mut bodies, mut seen) = (BTreeMap::<usize, BTreeSet<usize>>::new(), vec![false; blocks.len()]);
    // Functions that are called begin at blocks that no branch reaches.
    for first in 0..blocks.len() {
        // The way to a block: each one with those of its next that are left.
        let mut way = Vec::new();
        let mut go_to = |block: usize, way: &mut Vec<(usize, Vec<usize>)>| {
            if !std::mem::replace(&mut seen[block], true) {
                way.push((block, blocks[block].next.iter().copied().collect()));
            }
        };
        go_to(first, &mut way);
        while let Some((block, left)) = way.last_mut() {
            let (block, next) = (*block, left.pop());
            let Some(next) = next else {
                way.pop();
                continue;
            };
            if way.iter().all(|&(on_it, _)| on_it != next) {
                go_to(next, &mut way);
                continue;
            }
            let body = bodies.entry(next).or_insert_with(|| BTreeSet::from([next]));
            let mut reach = vec![block];
            while let Some(block) = reach.pop() {
                if body.insert(block) {
                    reach.extend(&before[block]);
                }
            }
        }
    }
    let mut bodies: Vec<BTreeSet<usize>> = bodies.into_values().collect();
    bodies.sort_by_key(|body| std::cmp::Reverse(body.len()));
    bodies
}

/// A text like `nvdisasm`'s, of `(instruction, loops around it, how often it counts)`: a loop in a loop, its wait that goes on behind the
/// end of the kernel, the loop of a warp that copies, and the branch to itself at the end.
pub fn test_of_a_text() -> Result<(), String> {
    let parts = [
        ("LDC R1, c[0x0][0x28]", 0, 1.0),
        ("@P3 BRA `(.L_copy)", 0, 1.0),
        (".L_outer:", 0, 0.0),
        ("@!P1 LDG.E.128 R4, desc[UR6][R6.64]", 1, 1.0),
        (".L_inner:", 0, 0.0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR13], R3", 2, 1.0),
        ("@!P0 BRA `(.L_wait)", 2, 1.0),
        (".L_there:", 0, 0.0),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24", 2, 1.0),
        ("@P0 BRA `(.L_inner)", 2, 1.0),
        ("BRA.DIV UR4, `(.L_outer)", 1, 1.0),
        ("STG.E.U16 desc[UR6][R6.64], R0", 0, 1.0),
        ("EXIT", 0, 1.0),
        (".L_copy:", 0, 0.0),
        ("UTMALDG.4D [UR8], [UR6]", 1, 0.125),
        ("BRA.U UP0, `(.L_copy)", 1, 0.125),
        ("EXIT", 0, 1.0),
        (".L_wait:", 0, 0.0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR13], R3", 2, 1.0),
        ("@!P0 BRA `(.L_wait)", 2, 1.0),
        ("BRA `(.L_there)", 2, 1.0),
        (".L_end:", 0, 0.0),
        ("BRA `(.L_end)", 0, 1.0),
    ];
    let mut text = "\t.section\t.text.other,\"ax\"\n        /*0000*/  EXIT ;\n\t.section\t.text.k,\"ax\"\nk:\n.text.k:\n".to_string();
    for (part, ..) in parts {
        text +=
            &if part.ends_with(':') { format!("{part}\n") } else { format!("        /*0010*/  {part} ;\n") };
    }
    let wanted = parts.iter().filter(|(part, ..)| !part.ends_with(':'));
    let wanted: Vec<_> = wanted.map(|&(_, loops, share)| (loops, share)).collect();
    let found = instructions(&(text + "        /*0020*/  NOP ;\n"), "k");
    let got: Vec<_> = found.iter().map(|i| (i.loops.len(), i.share)).collect();
    if got == wanted { Ok(()) } else { Err(format!("got {found:?}")) }
}
