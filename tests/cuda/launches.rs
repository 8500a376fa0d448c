//! How many kernels a transformer's block launches in a training step with matrices in bf16 and a residual stream in f32: a pass over memory
//! that is added is seen here.

use phalanx::nn::models::{Decoder, GptConfig, LlamaConfig};
use phalanx::nn::{Result, Scope};
use phalanx::{DType, Device, Tensor, Var};

const GPU: Device = Device::Cuda(0);
const CONTEXT: usize = 12;
const VOCABULARY: usize = 101;

type Model = fn(layers: usize, scope: &Scope) -> Result<Decoder>;

fn gpt(layers: usize, scope: &Scope) -> Result<Decoder> {
    GptConfig { stream: Some(DType::F32), ..GptConfig::new(VOCABULARY, CONTEXT, layers, 2, 32) }.init(scope)
}

fn llama(layers: usize, scope: &Scope) -> Result<Decoder> {
    LlamaConfig { stream: Some(DType::F32), ..LlamaConfig::new(VOCABULARY, CONTEXT, layers, 2, 32) }
        .init(scope)
}

/// Launches of the forward pass, of the loss and of the backward pass.
fn launches(model: Model, layers: usize) -> Result<[u64; 3]> {
    let model = model(layers, &Scope::new(1, DType::BF16, GPU))?;
    let ids = |from: i64| {
        let ids: Vec<i64> = (0..2 * CONTEXT as i64).map(|i| (7 * i + from) % VOCABULARY as i64).collect();
        Tensor::from_slice(&ids, &[2, CONTEXT], GPU).map(Var::new)
    };
    let (tokens, targets) = (ids(0)?, ids(7)?);
    let (mut counted, mut before) = ([0; 3], GPU.gpu()?.launches());
    let mut count = |at: usize| -> Result<()> {
        let now = GPU.gpu()?.launches();
        counted[at] = now - before;
        before = now;
        Ok(())
    };
    let hidden = model.forward(&tokens)?;
    count(0)?;
    let loss = model.loss(&hidden, &targets, 1.0)?;
    drop(hidden);
    count(1)?;
    loss.backward()?;
    count(2)?;
    Ok(counted)
}

/// The forward pass, the loss, and the backward pass of a model of one block, and how much a second block adds to each. A block of GPT has
///
/// ```text
/// forward    norm  qkv  attention  projection  sum and norm  inner and gelu  outer  sum
/// backward   cast  outer (2)  inner (2)  sum and norm (2)  projection (2)  attention (3)  qkv (2)  norm (2)
/// ```
const WANTED: [(&str, Model, [[u64; 3]; 2]); 2] =
    [("GPT", gpt, [[13, 4, 37], [8, 0, 16]]), ("Llama", llama, [[17, 4, 44], [15, 0, 31]])];

/// Compares the launches of a block, and of all that is not a block.
pub fn a_step_launches_so_many_kernels() -> std::result::Result<(), String> {
    for (name, model, wanted) in WANTED {
        let of = |layers| launches(model, layers).map_err(|e| e.to_string());
        let (one, two) = (of(1)?, of(2)?);
        let more = std::array::from_fn(|i| two[i] - one[i]);
        if [one, more] != wanted {
            return Err(format!("{name}: {one:?}, and {more:?} for another block, wanted {wanted:?}"));
        }
    }
    Ok(())
}
