//! From the syntax tree to decoded instructions, once, when a module is parsed: the [`Builder`] looks names up, chooses
//! the functions of types, and resolves labels. [`Form`] is an instruction's name with its modifiers and types.

use std::collections::HashMap;

use crate::ParseError;
use crate::code::{
    Asynchronous, Callee, CalleeKind, Instruction, Matrix, NOWHERE, Op, Preset, Program, Reg, ZERO,
};
use crate::decode::names::{Names, Symbol};
use crate::lanes::round::Mode;
use crate::module::{Kernel, Parameter, Variable};
use crate::shared_variable::{self, DYNAMIC, SharedVariable};
use crate::syntax::{
    Declaration, Function, LocDirective, Operand, RawInstruction, StateSpace, Statement, SyntaxTree,
    type_bytes,
};

mod arithmetic;
mod control;
mod matrix;
mod memory;
mod names;

/// Decodes all kernels of a module.
///
/// # Errors
/// With the line of the first instruction that the interpreter does not know.
pub(crate) fn module(tree: &SyntaxTree) -> Result<(Vec<Kernel>, Vec<Variable>), ParseError> {
    let stored =
        |d: &&Declaration| matches!(d.space, StateSpace::Global | StateSpace::Constant) && !d.external;
    let variables: Vec<Variable> = tree.variables.iter().filter(stored).map(variable).collect();
    let entries = tree.functions.iter().filter(|f| f.entry && f.body.is_some());
    let kernels = entries.map(|f| Builder::new(tree, &variables).kernel(f)).collect::<Result<_, _>>()?;
    Ok((kernels, variables))
}

fn variable(d: &Declaration) -> Variable {
    let (name, bytes, align, constant) = (d.name.clone(), d.bytes, d.align, d.space == StateSpace::Constant);
    Variable { name, bytes, align, constant, value: d.value.clone(), addresses: d.addresses.clone() }
}

/// A kernel under construction.
pub(crate) struct Builder<'a> {
    tree: &'a SyntaxTree,
    variables: &'a [Variable],
    program: Program,
    names: Names,
    constants: HashMap<Preset, Reg>,
    locations: HashMap<LocDirective, u32>,
    functions: HashMap<String, u32>,
    /// Functions that are called and not yet decoded.
    waiting: Vec<(u32, &'a Function)>,
    /// Branches whose label is still to be found: the instruction, its scope, the label.
    branches: Vec<(usize, usize, String)>,
    tables: Vec<(usize, usize, Vec<String>)>,
    shared: HashMap<String, u32>,
    shared_bytes: u32,
    dynamic_align: u32,
    parameters: Vec<Parameter>,
    carry: Option<Reg>,
    /// Of the instruction that is being decoded.
    line: u32,
    location: u32,
    guard: (Reg, bool),
}

fn aligned(at: u32, align: u32) -> u32 {
    at.next_multiple_of(align.max(1))
}

impl<'a> Builder<'a> {
    fn new(tree: &'a SyntaxTree, variables: &'a [Variable]) -> Builder<'a> {
        let mut builder = Builder {
            tree,
            variables,
            program: Program::default(),
            names: Names::default(),
            constants: HashMap::new(),
            locations: HashMap::new(),
            functions: HashMap::new(),
            waiting: Vec::new(),
            branches: Vec::new(),
            tables: Vec::new(),
            shared: HashMap::new(),
            shared_bytes: 0,
            dynamic_align: 16,
            parameters: Vec::new(),
            carry: None,
            line: 0,
            location: 0,
            guard: (NOWHERE, true),
        };
        builder.constant(0);
        builder
    }

    fn kernel(mut self, function: &'a Function) -> Result<Kernel, ParseError> {
        self.line = function.line;
        self.names.function();
        let mut offset = 0;
        for p in &function.parameters {
            offset = aligned(offset, p.align);
            self.names.add(&p.name, Symbol::Parameter(offset));
            let bytes = p.bytes as u32;
            self.parameters.push(Parameter { offset, bytes, align: p.align });
            offset += bytes;
        }
        self.body(function)?;
        while let Some((number, function)) = self.waiting.pop() {
            self.function(number, function)?;
        }
        self.resolve()?;
        let static_bytes = self.shared_bytes;
        self.program.dynamic_start = aligned(static_bytes, self.dynamic_align);
        self.program.sinks = self.sinks();
        self.watch();
        Ok(Kernel {
            name: function.name.clone(),
            parameters: self.parameters,
            shared_bytes: static_bytes,
            max_threads: function.threads_max,
            cluster: function.cluster,
            registers: self.program.registers,
            program: self.program,
        })
    }

    fn function(&mut self, number: u32, function: &'a Function) -> Result<(), ParseError> {
        self.names.function();
        let place = |builder: &mut Builder, list: &[Declaration]| -> Vec<(u32, u32)> {
            let mut places = Vec::new();
            for p in list {
                let offset = builder.local(p.bytes as u32, p.align);
                builder.names.add(&p.name, Symbol::Local(offset));
                places.push((offset, p.bytes as u32));
            }
            places
        };
        let returns = place(self, &function.returns);
        let parameters = place(self, &function.parameters);
        let kind = CalleeKind::Code(self.program.code.len() as u32);
        self.program.callees[number as usize] =
            Callee { name: function.name.clone(), kind, parameters, returns };
        self.body(function)
    }

    fn body(&mut self, function: &'a Function) -> Result<(), ParseError> {
        for statement in function.body.iter().flatten() {
            match statement {
                Statement::Open => self.names.open(),
                Statement::Close => self.names.close(),
                Statement::Label(name) => self.names.label(name, self.program.code.len() as u32),
                Statement::Declare(declaration) => self.declare(declaration)?,
                Statement::Targets(name, targets) => {
                    let number = self.program.tables.len();
                    self.program.tables.push(Vec::new());
                    self.tables.push((number, self.names.scope(), targets.clone()));
                    self.names.add(name, Symbol::Table(number as u32));
                }
                Statement::Prototype(name) => self.names.add(name, Symbol::Prototype),
                Statement::Instruction(raw) => self.instruction(raw)?,
            }
        }
        // A thread that runs past the end returns.
        (self.guard, self.location) = ((NOWHERE, true), 0);
        self.push(Op::Return, ZERO, &[]);
        Ok(())
    }

    fn declare(&mut self, d: &Declaration) -> Result<(), ParseError> {
        self.line = d.line;
        match d.space {
            StateSpace::Register => {
                let bits = if d.kind == "pred" { 1 } else { d.bytes as u32 * 8 };
                let many = d.many.unwrap_or(1);
                let first = self.program.registers;
                self.program.registers += many;
                match d.many {
                    Some(_) => self.names.add(&d.name, Symbol::Registers(first, many, bits)),
                    None => self.names.add(&d.name, Symbol::Register(first, bits)),
                }
            }
            StateSpace::Local | StateSpace::Parameter => {
                let offset = self.local(d.bytes as u32, d.align);
                self.names.add(&d.name, Symbol::Local(offset));
            }
            StateSpace::Shared => {
                let address = self.share(&d.name, d.bytes as u32, d.align);
                self.names.add(&d.name, Symbol::Shared(address));
            }
            StateSpace::Global | StateSpace::Constant => {
                return self.error("a variable of the module's inside of a function");
            }
        }
        Ok(())
    }

    fn instruction(&mut self, raw: &RawInstruction) -> Result<(), ParseError> {
        self.line = raw.line;
        self.location = self.location_of(&raw.loc);
        self.guard = (NOWHERE, true);
        if let Some((name, negated)) = &raw.guard {
            self.guard = (self.register(name)?.0, !negated);
        }
        let form = Form::new(&raw.parts);
        let ops = &raw.operands;
        let known = self.arithmetic(&form, ops)?
            || self.memory(&form, ops)?
            || self.control(&form, ops)?
            || self.together(&form, ops)?
            || self.matrix(&form, ops)?
            || self.asynchronous(&form, ops)?;
        if known { Ok(()) } else { self.error(&format!("unsupported instruction `{}`", raw.parts.join("."))) }
    }

    fn location_of(&mut self, loc: &Option<LocDirective>) -> u32 {
        let Some(loc) = loc else { return 0 };
        if let Some(&number) = self.locations.get(loc) {
            return number;
        }
        self.program.locations.push(loc.resolve(&self.tree.files));
        let number = self.program.locations.len() as u32;
        self.locations.insert(loc.clone(), number);
        number
    }

    /// Finds the labels of all branches.
    fn resolve(&mut self) -> Result<(), ParseError> {
        for (at, scope, label) in std::mem::take(&mut self.branches) {
            self.line = self.program.code[at].line;
            let target = self.target(scope, &label)?;
            self.program.code[at].op = Op::Branch(target);
        }
        for (number, scope, labels) in std::mem::take(&mut self.tables) {
            let targets = labels.iter().map(|label| self.target(scope, label)).collect::<Result<_, _>>()?;
            self.program.tables[number] = targets;
        }
        Ok(())
    }

    fn target(&self, scope: usize, label: &str) -> Result<u32, ParseError> {
        match self.names.find_label(scope, label) {
            Some(target) => Ok(target),
            None => self.error(&format!("no label `{label}`")),
        }
    }

    /// Which registers must not hold what nothing has written. Arithmetic passes it on, and a store puts it down.
    fn sinks(&self) -> Vec<bool> {
        let mut sinks = vec![false; self.program.registers as usize];
        for i in &self.program.code {
            let operands = match i.op {
                Op::Map(_) => [NOWHERE; 4],
                Op::Store(_) => [i.a, NOWHERE, NOWHERE, NOWHERE],
                _ => [i.a, i.b, i.c, i.e],
            };
            for reg in operands.into_iter().chain([i.guard]) {
                if let Some(flag) = sinks.get_mut(reg as usize) {
                    *flag = true;
                }
            }
            match i.op {
                Op::Atomic(atomic) if atomic.count > 1 => {
                    self.mark(&mut sinks, atomic.list, atomic.count as u32)
                }
                Op::Matrix(number) => match self.program.matrices[number as usize] {
                    Matrix::Fragment(f) if !f.loads => self.mark(&mut sinks, f.list, f.count),
                    Matrix::Tile(t) if !t.loads => self.mark(&mut sinks, t.list, t.count),
                    Matrix::TileProduct(p) => {
                        (0..3).for_each(|i| self.mark(&mut sinks, p.lists[i], p.counts[i]));
                    }
                    Matrix::Product(p) => {
                        let registers = p.k * p.a_kind.bits() / 64;
                        self.mark(&mut sinks, p.a, registers);
                        self.mark(&mut sinks, p.b, registers / 2);
                        self.mark(&mut sinks, p.c, 4 * p.c_kind.bits() / 32);
                    }
                    Matrix::Warpgroup(p) => {
                        self.mark(&mut sinks, p.a, p.a_count);
                        self.mark(&mut sinks, p.d, p.d_count);
                    }
                    _ => {}
                },
                Op::Asynchronous(number) => {
                    if let Asynchronous::Bulk(bulk) = self.program.asynchronous[number as usize] {
                        self.mark(&mut sinks, bulk.list, bulk.rank as u32 + bulk.multicast as u32);
                    }
                }
                _ => {}
            }
        }
        sinks
    }

    fn mark(&self, sinks: &mut [bool], list: u32, count: u32) {
        for &reg in &self.program.lists[list as usize..(list + count) as usize] {
            if let Some(flag) = sinks.get_mut(reg as usize) {
                *flag = true;
            }
        }
    }

    // What the families of instructions build with.

    fn error<T>(&self, what: &str) -> Result<T, ParseError> {
        Err(ParseError { line: self.line, what: what.into() })
    }

    /// Adds an instruction; sources are `a`, `b`, `c`, `e` in turn.
    fn push(&mut self, op: Op, d: Reg, sources: &[Reg]) -> usize {
        let source = |i: usize| sources.get(i).copied().unwrap_or(ZERO);
        self.program.code.push(Instruction {
            op,
            guard: self.guard.0,
            wanted: self.guard.1,
            watched: false,
            d,
            a: source(0),
            b: source(1),
            c: source(2),
            e: source(3),
            offset: 0,
            line: self.line,
            location: self.location,
        });
        self.program.code.len() - 1
    }

    /// A register of its own.
    fn fresh(&mut self) -> Reg {
        self.program.registers += 1;
        self.program.registers - 1
    }

    fn preset(&mut self, preset: Preset) -> Reg {
        if let Some(&reg) = self.constants.get(&preset) {
            return reg;
        }
        let reg = self.fresh();
        self.constants.insert(preset, reg);
        self.program.presets.push((reg, preset));
        reg
    }

    fn constant(&mut self, bits: u64) -> Reg {
        self.preset(Preset::Bits(bits))
    }

    fn local(&mut self, bytes: u32, align: u32) -> u32 {
        let offset = aligned(self.program.local_bytes, align);
        self.program.local_bytes = offset + bytes;
        offset
    }

    /// Places a variable in shared memory; its address there.
    fn share(&mut self, name: &str, bytes: u32, align: u32) -> u32 {
        let start = aligned(self.shared_bytes, align);
        self.shared_bytes = start + bytes;
        self.program.shared.push(SharedVariable { name: name.into(), start, bytes });
        match self.program.shared.len() as u32 {
            number if number < DYNAMIC => shared_variable::address(number, start),
            _ => start,
        }
    }

    /// Registers in a row of the program's lists.
    fn list(&mut self, registers: &[Reg]) -> u32 {
        let start = self.program.lists.len() as u32;
        self.program.lists.extend_from_slice(registers);
        start
    }

    fn want<'o>(
        &self,
        operands: &'o [Operand],
        least: usize,
        most: usize,
    ) -> Result<&'o [Operand], ParseError> {
        if (least..=most).contains(&operands.len()) {
            return Ok(operands);
        }
        self.error(&format!("{} operands where {least} to {most} are wanted", operands.len()))
    }
}

/// `add.rn.ftz.f32`, in its parts.
pub(crate) struct Form<'a> {
    pub(crate) parts: Vec<&'a str>,
}

impl<'a> Form<'a> {
    pub(crate) fn new(parts: &'a [String]) -> Form<'a> {
        Form { parts: parts.iter().map(String::as_str).collect() }
    }

    /// The first part.
    pub(crate) fn name(&self) -> &'a str {
        self.parts[0]
    }

    pub(crate) fn has(&self, part: &str) -> bool {
        self.parts[1..].contains(&part)
    }

    /// Whether a part begins like this.
    pub(crate) fn begins(&self, start: &str) -> bool {
        self.parts[1..].iter().any(|part| part.starts_with(start))
    }

    /// The types that are named, in order.
    pub(crate) fn kinds(&self) -> Vec<&'a str> {
        self.parts[1..].iter().copied().filter(|part| type_bytes(part).is_some()).collect()
    }

    /// The last type.
    pub(crate) fn kind(&self) -> Option<&'a str> {
        self.kinds().last().copied()
    }

    /// The direction of rounding.
    pub(crate) fn mode(&self) -> Option<Mode> {
        self.parts[1..].iter().find_map(|part| Mode::named(part))
    }

    /// The name with all modifiers but types, rounding, `.ftz` and those in `without`.
    pub(crate) fn key(&self, without: &[&str]) -> String {
        let kept = self.parts.iter().enumerate().filter(|(i, part)| {
            *i == 0
                || type_bytes(part).is_none()
                    && Mode::named(part).is_none()
                    && **part != "ftz"
                    && !without.contains(part)
        });
        kept.map(|(_, part)| *part).collect::<Vec<_>>().join(".")
    }
}
