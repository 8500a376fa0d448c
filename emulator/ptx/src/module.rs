//! A parsed module with its kernels and variables, and a module that is loaded into a memory.

use std::sync::Arc;

use crate::code::{Program, function_address};
use crate::{Memory, OutOfMemory, ParseError, decode, syntax};

/// PTX text, decoded. It is immutable, so threads may share it.
#[derive(Debug, Default)]
pub struct Module {
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) variables: Vec<Variable>,
    /// The names of the functions: an address of one is its number here.
    pub(crate) functions: Vec<String>,
}

impl Module {
    /// Parses and decodes PTX text.
    ///
    /// # Errors
    /// With the line of the first statement that is no PTX. An instruction that the interpreter does not know is a
    /// fault of the thread that reaches it.
    pub fn parse(ptx: &str) -> Result<Module, ParseError> {
        let tree = syntax::read(ptx)?;
        decode::module(&tree)
    }

    /// The kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
    }

    /// The kernel of a name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// The `.global` and `.const` variables of the module.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }
}

/// One parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Where it begins among the parameters' bytes.
    pub offset: u32,
    /// Its size.
    pub bytes: u32,
    /// Its alignment in bytes.
    pub align: u32,
}

/// A `.global` or `.const` variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name as the text has it (mangled).
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its alignment in bytes.
    pub align: u32,
    /// Whether it is `.const`.
    pub constant: bool,
    /// Its initial value; what is missing at the end is zero.
    pub value: Vec<u8>,
    /// Parts of the value that are addresses.
    pub addresses: Vec<AddressOf>,
}

/// Bytes of an initial value that are those of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressOf {
    /// Where they are in the value.
    pub offset: u64,
    /// The variable or function whose address it is.
    pub name: String,
    /// What is added to the address.
    pub added: u64,
    /// The first of the address's bytes.
    pub first: u32,
    /// How many of them.
    pub bytes: u32,
}

/// One `.entry`.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) shared_bytes: u32,
    pub(crate) max_threads: Option<u32>,
    pub(crate) cluster: Option<[u32; 3]>,
    pub(crate) registers: u32,
    pub(crate) program: Program,
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that its instructions come from, without its folders: the first `.cu` among those that lines of it are of,
    /// else the first of all.
    pub fn file(&self) -> Option<&str> {
        let mut first = None;
        for location in &self.program.locations {
            let mut next = Some(location);
            while let Some(at) = next {
                let name = at.file.rsplit('/').next().unwrap_or(&at.file);
                if name.ends_with(".cu") {
                    return Some(name);
                }
                first.get_or_insert(name);
                next = at.inlined_at.as_deref();
            }
        }
        first
    }

    /// Its parameters in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Bytes of all parameters together.
    pub fn parameter_bytes(&self) -> u32 {
        self.parameters.last().map_or(0, |last| last.offset + last.bytes)
    }

    /// Bytes of static shared memory a block.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Threads a block may have at most, if the kernel says so (`.maxntid`).
    pub fn max_threads(&self) -> Option<u32> {
        self.max_threads
    }

    /// Virtual registers a thread.
    pub fn registers(&self) -> u32 {
        self.registers
    }
}

/// A module whose `.global` and `.const` variables have addresses in a memory.
#[derive(Clone, Debug)]
pub struct Loaded {
    module: Arc<Module>,
    addresses: Vec<u64>,
}

impl Loaded {
    /// Allocates the module's variables in `memory` and gives them their initial values.
    ///
    /// # Errors
    /// If the memory is too small.
    pub fn new(module: Arc<Module>, memory: &Memory) -> Result<Loaded, OutOfMemory> {
        let mut addresses = Vec::new();
        for variable in module.variables() {
            addresses.push(memory.allocate(variable.bytes.max(1))?);
        }
        let loaded = Loaded { module, addresses };
        for (variable, &address) in loaded.module.variables().iter().zip(&loaded.addresses) {
            let value = variable.value_at(|name| loaded.address(name));
            // The allocation above is as long as the value.
            let _ = memory.write(address, &value);
        }
        Ok(loaded)
    }

    /// The address and the bytes of a variable.
    pub fn variable(&self, name: &str) -> Option<(u64, u64)> {
        let place = self.module.variables().iter().position(|v| v.name == name)?;
        Some((self.addresses[place], self.module.variables()[place].bytes))
    }

    /// The address of a variable or a function; 0 if the module has none of that name.
    fn address(&self, name: &str) -> u64 {
        let function = || self.module.functions.iter().position(|f| f == name).map(function_address);
        self.variable(name).map(|(address, _)| address).or_else(function).unwrap_or(0)
    }

    /// The module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Frees the variables; the module must not be launched afterwards.
    pub fn unload(self, memory: &Memory) {
        for address in self.addresses {
            // Each was allocated in `new`; if the program has freed one since, there is nothing left to free.
            let _ = memory.free(address);
        }
    }

    /// The addresses of all variables, in the module's order.
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl Variable {
    /// The bytes of the initial value, with the addresses that it names.
    fn value_at(&self, address: impl Fn(&str) -> u64) -> Vec<u8> {
        let mut value = self.value.clone();
        value.resize(self.bytes as usize, 0);
        for part in &self.addresses {
            let bytes = address(&part.name).wrapping_add(part.added).to_le_bytes();
            let bytes = bytes.iter().skip(part.first as usize).take(part.bytes as usize);
            value.iter_mut().skip(part.offset as usize).zip(bytes).for_each(|(to, byte)| *to = *byte);
        }
        value
    }
}
