//! From the syntax tree to decoded instructions, once, when a module is parsed: the [`Builder`] looks names up, chooses
//! the functions of types, and resolves labels.

use std::collections::HashMap;

use crate::ParseError;
use crate::code::{
    Asynchronous, Collective, FRAME_ALIGN, Instruction, Matrix, NOWHERE, Op, Preset, Program, Reg,
    STACK_BYTES, Update, ZERO,
};
use crate::decode::calls::CallGraph;
use crate::decode::form::{Form, is_space};
use crate::decode::names::{Names, Symbol, words};
use crate::module::{Kernel, Module, Parameter, Variable};
use crate::shared_variable::{self, DYNAMIC, SharedVariable};
use crate::syntax::{
    Declaration, Function, LocDirective, Operand, RawInstruction, StateSpace, Statement, SyntaxTree,
};

mod arithmetic;
mod calls;
mod control;
mod form;
mod matrix;
mod memory;
mod names;
mod video;

/// Decodes all kernels of a module.
///
/// # Errors
/// With the line of the first instruction that names what there is not.
pub(crate) fn module(tree: &SyntaxTree) -> Result<Module, ParseError> {
    let stored =
        |d: &&Declaration| matches!(d.space, StateSpace::Global | StateSpace::Constant) && !d.external;
    let variables: Vec<Variable> = tree.variables.iter().filter(stored).map(variable).collect();
    let graph = CallGraph::new(tree);
    let entries = tree.functions.iter().filter(|f| f.entry && f.body.is_some());
    let kernels =
        entries.map(|f| Builder::new(tree, &graph, &variables).kernel(f)).collect::<Result<_, _>>()?;
    Ok(Module { kernels, variables, functions: graph.names() })
}

fn variable(d: &Declaration) -> Variable {
    let (name, bytes, align, constant) = (d.name.clone(), d.bytes, d.align, d.space == StateSpace::Constant);
    Variable { name, bytes, align, constant, value: d.value.clone(), addresses: d.addresses.clone() }
}

/// A kernel under construction.
pub(crate) struct Builder<'a> {
    tree: &'a SyntaxTree,
    graph: &'a CallGraph<'a>,
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
    /// Of the function that is being decoded: the register that says where its frame begins, and the frame's bytes
    /// and alignment.
    frame: Reg,
    frame_bytes: u32,
    frame_align: u32,
    /// Whether the last error is one of the text, not of what the interpreter does not do.
    malformed: bool,
    /// Of the instruction that is being decoded.
    line: u32,
    location: u32,
    guard: (Reg, bool),
}

fn aligned(at: u32, align: u32) -> u32 {
    at.next_multiple_of(align.max(1))
}

impl<'a> Builder<'a> {
    fn new(tree: &'a SyntaxTree, graph: &'a CallGraph, variables: &'a [Variable]) -> Builder<'a> {
        let mut builder = Builder {
            tree,
            graph,
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
            frame: ZERO,
            frame_bytes: 0,
            frame_align: FRAME_ALIGN,
            malformed: false,
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
        if self.program.stacked {
            self.program.stack_start = aligned(self.program.local_bytes, FRAME_ALIGN);
            self.program.local_bytes = self.program.stack_start + STACK_BYTES;
        }
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
                Statement::Unknown(line, name) => {
                    (self.line, self.guard, self.location) = (*line, (NOWHERE, true), 0);
                    self.refuse(format!("directive `.{name}`"));
                }
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
                self.program.registers += many * words(bits);
                match d.many {
                    Some(_) => self.names.add(&d.name, Symbol::Registers(first, many, bits)),
                    None => self.names.add(&d.name, Symbol::Register(first, bits)),
                }
            }
            StateSpace::Local | StateSpace::Parameter => {
                self.local(d);
            }
            StateSpace::Shared => {
                let address = self.share(&d.name, d.bytes as u32, d.align);
                self.names.add(&d.name, Symbol::Shared(address));
            }
            StateSpace::Global | StateSpace::Constant => {
                return self.malformed("a variable of the module's inside of a function");
            }
        }
        Ok(())
    }

    fn instruction(&mut self, raw: &RawInstruction) -> Result<(), ParseError> {
        self.line = raw.line;
        self.location = self.location_of(&raw.loc);
        (self.guard, self.malformed) = ((NOWHERE, true), false);
        if let Some((name, negated)) = &raw.guard {
            self.guard = (self.register(name)?.0, !negated);
        }
        let (guard, code, branches) = (self.guard, self.program.code.len(), self.branches.len());
        let why = match self.known(&Form::new(&raw.parts), &raw.operands) {
            Ok(true) => return Ok(()),
            Err(error) if self.malformed => return Err(error),
            Ok(false) => String::new(),
            Err(error) => format!(": {}", error.what),
        };
        self.program.code.truncate(code);
        self.branches.truncate(branches);
        self.guard = guard;
        self.refuse(format!("instruction `{}`{why}", raw.parts.join(".")));
        Ok(())
    }

    /// Decodes an instruction, if there is one of this form.
    fn known(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        let least = form.operands_min();
        if ops.len() < least {
            return self.error(&format!("{} operands where at least {least} are wanted", ops.len()));
        }
        if ops.iter().any(|operand| *operand == Operand::Vector(Vec::new())) {
            return self.error("a vector without elements");
        }
        Ok(self.arithmetic(form, ops)?
            || self.memory(form, ops)?
            || self.control(form, ops)?
            || self.together(form, ops)?
            || self.matrix(form, ops)?
            || self.asynchronous(form, ops)?)
    }

    /// Adds an instruction that is a fault when a thread reaches it.
    fn refuse(&mut self, why: String) {
        let number = self.program.refusals.len() as u32;
        self.program.refusals.push(why);
        self.push(Op::Refused(number), NOWHERE, &[]);
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
            let target = self.label(scope, &label)?;
            self.program.code[at].op = Op::Branch(target);
        }
        for (number, scope, labels) in std::mem::take(&mut self.tables) {
            let targets = labels.iter().map(|label| self.label(scope, label)).collect::<Result<_, _>>()?;
            self.program.tables[number] = targets;
        }
        Ok(())
    }

    fn label(&self, scope: usize, label: &str) -> Result<u32, ParseError> {
        match self.names.find_label(scope, label) {
            Some(target) => Ok(target),
            None => self.error(&format!("no label `{label}`")),
        }
    }

    /// Which registers must not hold what nothing has written. Arithmetic and shuffles pass it on, and a store puts it down.
    fn sinks(&self) -> Vec<bool> {
        let mut sinks = vec![false; self.program.registers as usize];
        for i in &self.program.code {
            let operands = match i.op {
                Op::Map(_) => [NOWHERE; 4],
                Op::Store(_) => [i.a, NOWHERE, NOWHERE, NOWHERE],
                Op::Collective(Collective::Shuffle(_), _) => [NOWHERE, i.b, i.c, i.e],
                _ => [i.a, i.b, i.c, i.e],
            };
            for reg in operands.into_iter().chain([i.guard]) {
                if let Some(flag) = sinks.get_mut(reg as usize) {
                    *flag = true;
                }
            }
            match i.op {
                Op::Atomic(atomic) if atomic.count > 1 => {
                    let lists = if atomic.update == Update::Swap { 3 } else { 1 };
                    self.mark(&mut sinks, atomic.list, lists * atomic.count as u32)
                }
                Op::Matrix(number) => match self.program.matrices[number as usize] {
                    Matrix::Fragment(f) if !f.loads => self.mark(&mut sinks, f.list, f.count),
                    Matrix::Tile(t) if !t.loads => self.mark(&mut sinks, t.list, t.count),
                    Matrix::TileProduct(p) => {
                        (0..3).for_each(|i| self.mark(&mut sinks, p.lists[i], p.counts[i]));
                    }
                    Matrix::Product(p) => {
                        let [a, b, c, _] = p.counts();
                        self.mark(&mut sinks, p.a, a);
                        self.mark(&mut sinks, p.b, b);
                        self.mark(&mut sinks, p.c, c);
                    }
                    Matrix::SparseProduct(p) => {
                        let [a, b, c, _] = p.counts();
                        self.mark(&mut sinks, p.half.a, a);
                        self.mark(&mut sinks, p.half.b, b);
                        self.mark(&mut sinks, p.half.c, c);
                    }
                    Matrix::Warpgroup(p) => {
                        self.mark(&mut sinks, p.a, p.a_count);
                        self.mark(&mut sinks, p.d, p.d_count);
                    }
                    _ => {}
                },
                Op::Asynchronous(number) => match self.program.asynchronous[number as usize] {
                    Asynchronous::Bulk(bulk) => {
                        self.mark(&mut sinks, bulk.list, bulk.rank as u32 + bulk.multicast as u32);
                    }
                    Asynchronous::Send(send) => self.mark(&mut sinks, send.list, send.count as u32),
                    _ => {}
                },
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

    /// An error of the text.
    fn malformed<T>(&mut self, what: &str) -> Result<T, ParseError> {
        self.malformed = true;
        self.error(what)
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
