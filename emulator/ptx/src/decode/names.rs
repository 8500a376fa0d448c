//! Names of a kernel's registers, variables and labels, in the scopes that braces make; special registers and clocks.

use std::collections::HashMap;

use super::Builder;
use crate::ParseError;
use crate::code::{Clock, NOWHERE, Op, Preset, Reg, Slot, Special, ZERO};
use crate::lanes::{integer, map, round};
use crate::syntax::{Operand, StateSpace, type_bytes};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Symbol {
    Register(Reg, u32),
    /// `%r<n>`: the first, how many, bits of each.
    Registers(Reg, u32, u32),
    Shared(u32),
    Dynamic,
    Local(Slot),
    Parameter(u32),
    Variable(u32),
    Table(u32),
    Prototype,
}

#[derive(Debug, Default)]
struct Scope {
    parent: Option<usize>,
    names: HashMap<String, Symbol>,
    labels: HashMap<String, u32>,
}

/// The scopes of all functions of a kernel.
#[derive(Debug, Default)]
pub(crate) struct Names {
    scopes: Vec<Scope>,
    current: usize,
}

impl Names {
    /// A function's outermost scope: it sees no other function's names.
    pub(crate) fn function(&mut self) {
        self.current = self.scopes.len();
        self.scopes.push(Scope::default());
    }

    pub(crate) fn open(&mut self) {
        let parent = Some(self.current);
        self.current = self.scopes.len();
        self.scopes.push(Scope { parent, ..Scope::default() });
    }

    pub(crate) fn close(&mut self) {
        self.current = self.scopes[self.current].parent.unwrap_or(self.current);
    }

    pub(crate) fn scope(&self) -> usize {
        self.current
    }

    pub(crate) fn add(&mut self, name: &str, symbol: Symbol) {
        self.scopes[self.current].names.insert(name.to_string(), symbol);
    }

    pub(crate) fn label(&mut self, name: &str, at: u32) {
        self.scopes[self.current].labels.insert(name.to_string(), at);
    }

    fn outwards<T>(&self, from: usize, find: impl Fn(&Scope) -> Option<T>) -> Option<T> {
        let mut scope = Some(from);
        while let Some(at) = scope {
            if let Some(found) = find(&self.scopes[at]) {
                return Some(found);
            }
            scope = self.scopes[at].parent;
        }
        None
    }

    pub(crate) fn find_label(&self, scope: usize, name: &str) -> Option<u32> {
        self.outwards(scope, |s| s.labels.get(name).copied())
    }

    pub(crate) fn find(&self, name: &str) -> Option<Symbol> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        self.outwards(self.current, |scope| {
            if let Some(&symbol) = scope.names.get(name) {
                return Some(symbol);
            }
            let number: u32 = name[stem.len()..].parse().ok()?;
            match scope.names.get(stem) {
                Some(&Symbol::Registers(first, many, bits)) if number < many => {
                    Some(Symbol::Register(first + number * words(bits), bits))
                }
                _ => None,
            }
        })
    }
}

/// An address: a register, and what is added to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: Reg,
    pub(crate) offset: i64,
    /// What the base is a name of.
    pub(crate) symbol: Option<Symbol>,
}

impl<'a> Builder<'a> {
    /// A name of this kernel or of the module.
    pub(super) fn lookup(&mut self, name: &str) -> Option<Symbol> {
        if let Some(symbol) = self.names.find(name) {
            return Some(symbol);
        }
        if let Some(number) = self.variables.iter().position(|v| v.name == name) {
            return Some(Symbol::Variable(number as u32));
        }
        let shared = self.tree.variables.iter().find(|v| v.space == StateSpace::Shared && v.name == name)?;
        if shared.external || shared.bytes == 0 {
            self.dynamic_align = self.dynamic_align.max(shared.align);
            return Some(Symbol::Dynamic);
        }
        if let Some(&address) = self.shared.get(name) {
            return Some(Symbol::Shared(address));
        }
        let address = self.share(name, shared.bytes as u32, shared.align);
        self.shared.insert(name.to_string(), address);
        Some(Symbol::Shared(address))
    }

    /// A register and its bits.
    pub(super) fn register(&mut self, name: &str) -> Result<(Reg, u32), ParseError> {
        match self.names.find(name) {
            Some(Symbol::Register(reg, bits)) => Ok((reg, bits)),
            _ => self.malformed(&format!("no register `{name}`")),
        }
    }

    /// A destination and its bits.
    pub(super) fn destination(&mut self, operand: &Operand) -> Result<(Reg, u32), ParseError> {
        match operand {
            Operand::Name(name, 0) => self.register(name),
            Operand::Nothing => Ok((NOWHERE, 64)),
            _ => self.error("a register wanted as the destination"),
        }
    }

    /// A source of a type, as a register.
    pub(super) fn source(&mut self, operand: &Operand, kind: &str) -> Result<Reg, ParseError> {
        match operand {
            Operand::Name(name, added) => self.named(name, *added, kind),
            Operand::Integer(bits) => {
                let bits = match kind {
                    "f32" => (*bits as i64 as f32).to_bits() as u64,
                    "f64" => (*bits as i64 as f64).to_bits(),
                    _ => *bits,
                };
                let width = type_bytes(kind).unwrap_or(8).min(8) * 8;
                let bits =
                    if kind == "pred" { (bits != 0) as u64 } else { bits << (64 - width) >> (64 - width) };
                Ok(self.constant(bits))
            }
            Operand::Float(value) => {
                let bits = match type_bytes(kind) {
                    Some(8) => value.to_bits(),
                    Some(2) if kind.starts_with('b') && kind != "b16" => {
                        round::bf16_bits(round::round(*value, round::Mode::Nearest, round::BF16)) as u64
                    }
                    Some(2) => round::f16_bits(round::round(*value, round::Mode::Nearest, round::F16)) as u64,
                    _ => (*value as f32).to_bits() as u64,
                };
                Ok(self.constant(bits))
            }
            Operand::Not(inner) => {
                let source = self.source(inner, "pred")?;
                let Some(map) = integer::bits("not", "pred") else { return self.error("no `not`") };
                Ok(self.unguarded(Op::Map(map), &[source]))
            }
            Operand::Nothing => Ok(ZERO),
            _ => self.error("a register or a number wanted"),
        }
    }

    fn named(&mut self, name: &str, added: i64, kind: &str) -> Result<Reg, ParseError> {
        if let Some(Symbol::Register(reg, _)) = self.names.find(name) {
            return if added == 0 {
                Ok(reg)
            } else {
                self.error("a register with something added outside of an address")
            };
        }
        if let Some(register) = special(name) {
            return Ok(self.preset(Preset::Special(register)));
        }
        if name == "WARP_SZ" {
            return Ok(self.constant(32));
        }
        if matches!(
            name,
            "%clock" | "%clock_hi" | "%clock64" | "%globaltimer" | "%globaltimer_lo" | "%globaltimer_hi"
        ) {
            return self.clock(name);
        }
        if let Some(symbol) = self.lookup(name) {
            return match self.symbol_register(symbol, added) {
                Some(reg) => Ok(reg),
                None => self.error(&format!("`{name}` is no value")),
            };
        }
        if let Some(reg) = self.function_register(name) {
            return Ok(reg);
        }
        if is_special(name) {
            return self.error(&format!("unsupported special register `{name}`"));
        }
        self.malformed(&format!("no register, variable or function `{name}` (as {kind})"))
    }

    fn symbol_register(&mut self, symbol: Symbol, added: i64) -> Option<Reg> {
        Some(match symbol {
            Symbol::Shared(offset) | Symbol::Parameter(offset) => {
                self.constant((offset as u64).wrapping_add_signed(added))
            }
            Symbol::Local(slot) => {
                let at = self.constant((slot.offset as u64).wrapping_add_signed(added));
                if slot.frame == ZERO { at } else { self.sum(slot.frame, at) }
            }
            Symbol::Dynamic => self.preset(Preset::Dynamic(added as u64)),
            Symbol::Variable(number) => self.preset(Preset::Variable(number, added as u64)),
            _ => return None,
        })
    }

    /// `[name + offset]`.
    pub(super) fn address(&mut self, operand: &Operand) -> Result<Address, ParseError> {
        let inner = match operand {
            Operand::Address(parts) if !parts.is_empty() => &parts[0],
            // The target of a prefetch or the like may go without brackets.
            _ => return self.error("an address wanted"),
        };
        match inner {
            Operand::Name(name, offset) => {
                if let Some(Symbol::Register(base, _)) = self.names.find(name) {
                    return Ok(Address { base, offset: *offset, symbol: None });
                }
                let symbol = self.lookup(name);
                if let Some(Symbol::Local(slot)) = symbol {
                    return Ok(Address { base: slot.frame, offset: slot.offset as i64 + offset, symbol });
                }
                let base = self.named(name, 0, "u64")?;
                Ok(Address { base, offset: *offset, symbol })
            }
            Operand::Integer(at) => Ok(Address { base: ZERO, offset: *at as i64, symbol: None }),
            _ => self.error("an address of another form"),
        }
    }

    /// The registers of 64 bits that an operand of elements of 128 bits is.
    pub(super) fn words(&mut self, operand: &Operand) -> Result<Vec<Reg>, ParseError> {
        let mut found = Vec::new();
        for element in self.elements(operand) {
            match element {
                Operand::Name(name, 0) => {
                    let (reg, bits) = self.register(name)?;
                    found.extend(reg..reg + words(bits));
                }
                Operand::Integer(bits) => found.push(self.constant(*bits)),
                _ => return self.error("a register of 128 bits wanted"),
            }
        }
        Ok(found)
    }

    /// The elements of a vector, or one operand alone.
    pub(super) fn elements<'o>(&self, operand: &'o Operand) -> Vec<&'o Operand> {
        match operand {
            Operand::Vector(parts) => parts.iter().collect(),
            one => vec![one],
        }
    }
}

/// The registers that one of so many bits takes: each has 64.
pub(crate) fn words(bits: u32) -> u32 {
    bits.div_ceil(64)
}

/// The special register of a name, except for clocks.
pub(crate) fn special(name: &str) -> Option<Special> {
    let (stem, axis) = match name.split_once('.') {
        Some((stem, "x")) => (stem, 0),
        Some((stem, "y")) => (stem, 1),
        Some((stem, "z")) => (stem, 2),
        Some(_) => return None,
        None => (name, 0),
    };
    Some(match stem {
        "%tid" => Special::Thread(axis),
        "%ntid" => Special::Threads(axis),
        "%ctaid" => Special::Block(axis),
        "%nctaid" => Special::Blocks(axis),
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%smid" => Special::Processor,
        "%nsmid" => Special::Processors,
        "%gridid" => Special::Grid,
        "%lanemask_eq" => Special::MaskEqual,
        "%lanemask_lt" => Special::MaskBelow,
        "%lanemask_le" => Special::MaskUpTo,
        "%lanemask_gt" => Special::MaskAbove,
        "%lanemask_ge" => Special::MaskFrom,
        "%dynamic_smem_size" => Special::DynamicShared,
        "%total_smem_size" => Special::TotalShared,
        "%cluster_ctaid" => Special::ClusterThreadBlock(axis),
        "%cluster_nctaid" => Special::ClusterBlocks(axis),
        "%clusterid" => Special::Cluster(axis),
        "%nclusterid" => Special::Clusters(axis),
        "%cluster_ctarank" => Special::ClusterRank,
        "%cluster_nctarank" => Special::ClusterSize,
        "%is_explicit_cluster" => Special::ExplicitCluster,
        "%envreg0" => Special::Environment(0),
        "%envreg1" => Special::Environment(1),
        "%envreg2" => Special::Environment(2),
        _ => return None,
    })
}

/// Whether PTX has a special register of this name that the interpreter does not have.
fn is_special(name: &str) -> bool {
    ["%pm", "%envreg", "%reserved_smem", "%aggr_smem_size", "%current_graph"]
        .iter()
        .any(|s| name.starts_with(s))
}

impl Builder<'_> {
    /// A clock is read where it stands: an instruction of its own.
    pub(super) fn clock(&mut self, name: &str) -> Result<Reg, ParseError> {
        let clock = match name {
            "%clock" | "%globaltimer_lo" => Clock::Low,
            "%clock_hi" | "%globaltimer_hi" => Clock::High,
            _ => Clock::Whole,
        };
        Ok(self.unguarded(Op::ReadClock(clock), &[]))
    }

    /// The result of an operation that all lanes carry out.
    fn unguarded(&mut self, op: Op, sources: &[Reg]) -> Reg {
        let d = self.fresh();
        let guard = std::mem::replace(&mut self.guard, (NOWHERE, true));
        self.push(op, d, sources);
        self.guard = guard;
        d
    }

    /// The sum of two addresses.
    fn sum(&mut self, a: Reg, b: Reg) -> Reg {
        self.unguarded(Op::Map(map!((a: u64, b: u64) -> u64 { a.wrapping_add(b) })), &[a, b])
    }
}
