//! [`Plan`]: a product whose shapes and types were checked. The heuristic gives two algorithms for each product, which
//! differ in their bits as the library's do: the first adds all of k in one chain, the second in two chains. The first
//! asks for a workspace where k is long, as split-k algorithms do. It only overwrites its workspace, so that a program
//! that keeps something else there notices.

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::pointer::In;

use crate::description::{Bias, DESCRIPTIONS, Description};
use crate::element::{ElementType, InputRounding};
use crate::layout::{Layout, layout};
use crate::status::{Result, Status};

/// The library's handles.
pub(crate) static LIBRARIES: Handles<()> = Handles::new("cublasLt handle", 16);

/// What is computed: shapes and types are checked, addresses are not known yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub description: Description,
    pub a: Layout,
    pub b: Layout,
    pub c: Layout,
    pub d: Layout,
    /// D is m x n, op(A) is m x k, op(B) is k x n.
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Plan {
    /// # Errors
    /// Shapes that do not fit, or what is not emulated.
    pub(crate) fn new(description: Description, [a, b, c, d]: [Layout; 4]) -> Result<Plan> {
        let shape = |layout: &Layout, transposed| match transposed {
            false => (layout.rows, layout.columns),
            true => (layout.columns, layout.rows),
        };
        let ((m, k), (k_b, n)) = (shape(&a, description.transposed[0]), shape(&b, description.transposed[1]));
        if k != k_b || (m, n) != (d.rows, d.columns) || (c.rows, c.columns) != (d.rows, d.columns) {
            return Err(Status::INVALID_VALUE.because(format!(
                "op(A) is {m} x {k}, op(B) is {k_b} x {n}, C is {} x {}, D is {} x {}",
                c.rows, c.columns, d.rows, d.columns
            )));
        }
        let counts = [a.batches, b.batches, c.batches, d.batches];
        if counts.iter().any(|count| *count != d.batches || *count == 0) {
            return Err(
                Status::INVALID_VALUE.because(format!("batch counts of A, B, C and D are {counts:?}"))
            );
        }
        let plan = Plan { description, a, b, c, d, m, n, k };
        plan.check_types()?;
        plan.check_epilogue()?;
        Ok(plan)
    }

    fn check_types(&self) -> Result<()> {
        let Description { double, scale, inputs, .. } = self.description;
        let (a, b, c, d) = (self.a.kind, self.b.kind, self.c.kind, self.d.kind);
        let results = match a {
            ElementType::F64 => double && d == ElementType::F64,
            ElementType::F32 => !double && d == ElementType::F32,
            narrow => !double && (d == narrow || d == ElementType::F32) && inputs == InputRounding::AsTheyAre,
        };
        let scales = scale == if double { ElementType::F64 } else { ElementType::F32 };
        if a == b && c == d && results && scales {
            return Ok(());
        }
        Err(Status::NOT_SUPPORTED.because(format!(
            "A is {a:?}, B is {b:?}, C is {c:?}, D is {d:?}, alpha and beta are {scale:?}, computed in {}",
            if double { "f64" } else { "f32" }
        )))
    }

    /// The rules of NVIDIA's documentation of cuBLASLt 13: of `cublasLtMatmulDescAttributes_t` for aux and the bias, and of
    /// the table of types of `cublasLtMatmul`, in which a bias has D's type for each type that is emulated. For the
    /// alignment of aux it says only that the heuristic looks at the pointer; 16 bytes are what the kernels read at a time.
    fn check_epilogue(&self) -> Result<()> {
        let Description { epilogue, bias_kind, aux, aux_kind, aux_leading, aux_stride, .. } =
            self.description;
        if !epilogue.is_default() && self.d.by_rows {
            return Err(
                Status::NOT_SUPPORTED.because("an epilogue for a D that lies in rows is not emulated")
            );
        }
        let of_d = |kind: Option<ElementType>| kind.is_none_or(|kind| kind == self.d.kind);
        if epilogue.bias != Bias::None && !of_d(bias_kind) {
            let why = format!("the bias is {:?}, and D is {:?}", self.bias().kind, self.d.kind);
            return Err(Status::NOT_SUPPORTED.because(why));
        }
        if !epilogue.uses_aux() {
            return Ok(());
        }
        if !of_d(aux_kind) {
            let why = format!("aux is {:?}, and D is {:?}", self.aux().kind, self.d.kind);
            return Err(Status::NOT_SUPPORTED.because(why));
        }
        if aux_leading < self.m || !aux_leading.is_multiple_of(8) {
            let why =
                format!("aux has a leading dimension of {aux_leading}: a multiple of 8 from {} on", self.m);
            return Err(Status::INVALID_VALUE.because(why));
        }
        if self.d.batches > 1 && aux_stride % 8 != 0 {
            let why = format!("aux has a batch stride of {aux_stride}: a multiple of 8");
            return Err(Status::INVALID_VALUE.because(why));
        }
        if !aux.is_multiple_of(16) {
            return Err(Status::NOT_SUPPORTED.because("aux begins at no multiple of 16 bytes"));
        }
        Ok(())
    }

    /// How aux lies.
    pub(crate) fn aux(&self) -> Layout {
        let d = &self.description;
        Layout {
            kind: d.aux_kind.unwrap_or(self.d.kind),
            leading: d.aux_leading,
            batch_stride: d.aux_stride,
            ..self.d
        }
    }

    /// How the bias lies: one column, of D's rows or, for op(B)'s sums, of its columns.
    pub(crate) fn bias(&self) -> Layout {
        let d = &self.description;
        let rows = if d.epilogue.bias == Bias::GradientOfB { self.n } else { self.m };
        let kind = d.bias_kind.unwrap_or(self.d.kind);
        Layout {
            kind,
            by_rows: false,
            rows,
            columns: 1,
            leading: rows,
            batch_stride: d.bias_stride,
            ..self.d
        }
    }
}

/// `cublasLtMatmulAlgo_t`.
pub(crate) type Algorithm = [u64; 8];

/// How an algorithm begins; the bytes of its workspace follow, and the chains that it adds k in.
const MARK: u64 = 0x7068_616c_616e_7801;
/// A workspace begins at a multiple of this, and is as long as one.
pub(crate) const WORKSPACE_ALIGNMENT: u64 = 256;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// An algorithm's choices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choices {
    pub workspace_bytes: u64,
    /// How many chains of additions k is cut into.
    pub chains: usize,
}

/// The algorithms for a product, the best one first, if a workspace has at most `bytes_max` bytes.
pub(crate) fn algorithms(plan: &Plan, bytes_max: u64) -> [Choices; 2] {
    let first = Choices { workspace_bytes: workspace(plan, bytes_max), chains: 1 };
    [first, Choices { workspace_bytes: 0, chains: 2 }]
}

/// The algorithm of these choices.
pub(crate) fn found(choices: Choices) -> HeuristicResult {
    let Choices { workspace_bytes, chains } = choices;
    HeuristicResult {
        algorithm: [MARK, workspace_bytes, chains as u64, 0, 0, 0, 0, 0],
        workspace_bytes: workspace_bytes as usize,
        state: 0,
        waves: 1.0,
        reserved: [0; 4],
    }
}

/// Bytes of the workspace that a split-k algorithm would take: two sums for each element. 0 if k is short, or if that is
/// more than `bytes_max`.
fn workspace(plan: &Plan, bytes_max: u64) -> u64 {
    let parts = 2 * (plan.m * plan.n * plan.d.batches * size_of::<f32>()) as u64;
    let bytes = parts.next_multiple_of(WORKSPACE_ALIGNMENT);
    if plan.k >= 2 * plan.m.max(plan.n) && bytes <= bytes_max { bytes } else { 0 }
}

/// The product that these handles describe.
pub(crate) fn plan(library: usize, operation: usize, [a, b, c, d]: [usize; 4]) -> Result<Plan> {
    LIBRARIES.get(library)?;
    let layouts = [layout(a, "A")?, layout(b, "B")?, layout(c, "C")?, layout(d, "D")?];
    Plan::new(DESCRIPTIONS.get(operation)?, layouts)
}

/// An algorithm's choices; without one, the simplest. One that the heuristic did not give is an error.
pub(crate) fn check(algorithm: In<Algorithm>) -> Result<Choices> {
    match algorithm.get() {
        None => Ok(Choices { workspace_bytes: 0, chains: 1 }),
        Some([MARK, workspace_bytes, chains @ 1..=2, 0, 0, 0, 0, 0]) => {
            Ok(Choices { workspace_bytes, chains: chains as usize })
        }
        Some(_) => {
            Err(Status::INVALID_VALUE.because("the algorithm is none that this library's heuristic gave"))
        }
    }
}

/// The number of the attribute that says how large a workspace may be: of a preference nothing else is looked at.
pub(crate) const MAX_WORKSPACE_BYTES: i32 = 1;

/// All preferences of the heuristic: how many bytes a workspace may have.
pub(crate) static PREFERENCES: Handles<u64> = Handles::new("preference", 19);
