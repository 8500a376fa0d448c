//! Products of bf16 by our own kernels (`PHALANX_CUDA_ALGORITHMS=own`) on an H100, beside the time that cuBLASLt's are predicted to take.
//!
//! The roofline knows no tiles, and they decide here: a block makes one tile, and nothing runs beside its first copy and its last store.
//! So a product takes, in cycles,
//!
//! ```text
//! ceil(tiles / processors) x (first + steps of 64 x step / share + last)
//!   first   from the first copy to its data
//!   step    the tile's operations / those of a processor's tensor cores in a cycle
//!   share   what cuBLASLt reaches of these, or what the kernel's instructions allow, if that is less
//!   last    bytes of the tile / a processor's part of what the memory moves in a cycle
//! ```
//!
//! but no less than its bytes take. The model leaves out the cache (of which a tile of 256 columns wants 48 bytes a cycle and processor) and
//! clocks that fall under load, other than by cuBLASLt's measured share.

use std::error::Error;
use std::fmt::Write;

use phalanx::tensor::cuda::{LoggedOperation, take_dry_log};
use phalanx::{DType, Device, kernels};

use crate::roofline::{
    Ceilings, Class, GAP_MS, LATENCY_CYCLES, MACHINES, TENSOR_FLOPS, milliseconds, shares,
};

pub const FILE: &str = "own-products.txt";

/// The rows of a linear layer's input, and its widths.
type Layer = (&'static str, usize, usize, usize);

const LAYERS: [Layer; 10] = [
    ("GPT-2 124M: query, key, value", 64 * 1024, 768, 2304),
    ("GPT-2 124M: attention's output", 64 * 1024, 768, 768),
    ("GPT-2 124M: MLP", 64 * 1024, 768, 3072),
    ("GPT-2 124M: MLP's output", 64 * 1024, 3072, 768),
    ("GPT-2 124M: head", 64 * 1024, 768, 50304),
    ("Llama-3-8B: query", 8192, 4096, 4096),
    ("Llama-3-8B: key", 8192, 4096, 1024),
    ("Llama-3-8B: MLP", 8192, 4096, 14_336),
    ("Llama-3-8B: MLP's output", 8192, 14_336, 4096),
    ("a square", 8192, 8192, 8192),
];

const FORMS: [&str; 3] = ["x Wᵀ", "dy W", "dyᵀ x"];

/// The products of a layer in a training step: its output, its input's gradient and its weight's.
fn run((_, rows, from, to): Layer) -> Result<Vec<LoggedOperation>, Box<dyn Error>> {
    let zeros = |shape: [usize; 2]| kernels::full(&shape, 0.0, DType::BF16, Device::Cuda(0));
    let (input, weight, gradient) = (zeros([rows, from])?, zeros([to, from])?, zeros([rows, to])?);
    take_dry_log()?;
    kernels::matmul(&input, &weight.transpose(0, 1)?)?;
    kernels::matmul(&gradient, &weight)?;
    kernels::matmul(&gradient.transpose(0, 1)?, &input)?;
    let products = take_dry_log()?.operations.into_iter().filter(|o| o.traffic.flops > 0);
    Ok(products.collect())
}

/// What is predicted of one product.
struct Predicted {
    columns: usize,
    tiles: usize,
    waves: usize,
    /// Our own kernel's, and cuBLASLt's.
    ms: [f64; 2],
}

fn predict(
    operation: &LoggedOperation,
    [m, n, k]: [usize; 3],
    known: &Ceilings,
) -> Result<Predicted, Box<dyn Error>> {
    let machine = &MACHINES[0];
    let tiles_of = |columns: usize| m.div_ceil(128) * n.div_ceil(columns);
    let tiles: usize = operation.grid.iter().map(|&n| n as usize).product();
    let columns = [256, 128].into_iter().find(|&columns| tiles_of(columns) == tiles);
    let (Some(columns), "gemm_warpgroup") = (columns, operation.name.as_str()) else {
        let (name, grid) = (&operation.name, operation.grid);
        return Err(format!("{m} x {n} x {k}: {name} with {grid:?} blocks, not warpgroups").into());
    };
    let processors = machine.processors as usize;
    let clock = machine.tensor / (machine.processors * TENSOR_FLOPS);
    let [allowed, _] = known.of_variants("matmul", "gemm_warpgroup", &format!("COLUMNS={columns} "));
    let [reached, moved] = shares(Class::Product);
    let share = reached.min(allowed);
    let step = (2 * 128 * columns * 64) as f64 / TENSOR_FLOPS / share;
    let last = (2 * 128 * columns) as f64 * machine.processors * clock / (machine.memory * moved);
    let (waves, steps) = (tiles.div_ceil(processors), k.div_ceil(64));
    let cycles = waves as f64 * (LATENCY_CYCLES + steps as f64 * step + last);
    let mut library = operation.clone();
    (library.kind, library.name) = ("library".into(), "product".into());
    let (theirs, ..) = milliseconds(&library, machine, known);
    let bytes = (operation.traffic.read + operation.traffic.written) as f64;
    let own = (1e3 * cycles / clock).max(1e3 * bytes / (machine.memory * moved)) + GAP_MS;
    Ok(Predicted { columns, tiles, waves, ms: [own, theirs] })
}

pub fn table() -> Result<String, Box<dyn Error>> {
    let known = Ceilings::read()?;
    let mut text = String::from(
        "Products of bf16 by our own kernels on an H100, and by cuBLASLt.\n\nWritten by `cargo test --test dry -- --write`. Milliseconds \
         are predicted by tests/dry/products.rs and roofline.rs.\n\n",
    );
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:>7}{:>7}{:>7}{:>9}{:>7}{:>7}{:>10}{:>13}{:>8}  product",
        "m", "n", "k", "columns", "tiles", "waves", "own ms", "cuBLASLt ms", "share"
    );
    let mut all = [[0.0; 2]; 3];
    for layer in LAYERS {
        let (name, rows, from, to) = layer;
        let sizes = [[rows, to, from], [rows, from, to], [to, from, rows]];
        let logged = run(layer)?;
        if logged.len() != FORMS.len() {
            return Err(
                format!("{name}: {} products were logged, wanted {}", logged.len(), FORMS.len()).into()
            );
        }
        for (form, (operation, [m, n, k])) in logged.iter().zip(sizes).enumerate() {
            let Predicted { columns, tiles, waves, ms: [own, theirs] } =
                predict(operation, [m, n, k], &known)?;
            let (share, what) = (theirs / own, FORMS[form]);
            let _ = writeln!(
                text,
                "{m:>7}{n:>7}{k:>7}{columns:>9}{tiles:>7}{waves:>7}{own:>10.3}{theirs:>13.3}{share:>8.2}  {name}: {what}"
            );
            (all[form][0], all[form][1]) = (all[form][0] + own, all[form][1] + theirs);
        }
    }
    for ([own, theirs], what) in all.into_iter().zip(FORMS) {
        let _ = writeln!(text, "{own:>54.3}{theirs:>13.3}{:>8.2}  all {what}", theirs / own);
    }
    Ok(text)
}
