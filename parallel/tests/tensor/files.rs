//! Hugging Face folders of models that are cut, by layers and by stages.

use std::sync::Arc;

use phalanx_nn::models::{GptConfig, LlamaConfig, ModelConfig, Stage, load_stage, read_config};
use phalanx_nn::{OneDevice, Parameters, Scope};
use phalanx_parallel::mesh::{Axis, Groups, Mesh};
use phalanx_parallel::tensor_parallel::{TensorParallel, save_model};
use phalanx_parallel::{Error, Result, launch};
use phalanx_tensor::{DType, Device};

use crate::kit::{build, part_of};

/// A rank's part of a model on a mesh of stages.
fn stage(groups: &Groups, layers: usize) -> Stage {
    let (stages, at) = (groups.mesh().size(Axis::Pp), groups.at().pp);
    let layers = layers * at / stages..layers * (at + 1) / stages;
    Stage { layers, first: at == 0, last: at + 1 == stages }
}

#[test]
fn any_layout_writes_the_bytes_of_one_device_and_reads_its_part_of_them() {
    let gpt = GptConfig::new(29, 8, 3, 6, 12);
    let llama = LlamaConfig { key_heads: 2, inner: 20, ..LlamaConfig::new(29, 8, 3, 6, 12) };
    let configs = [
        ModelConfig::Gpt(gpt.clone()),
        ModelConfig::Gpt(GptConfig { tied: false, ..gpt }),
        ModelConfig::Llama(llama.clone()),
        ModelConfig::Llama(LlamaConfig { tied: true, attention_bias: true, ..llama }),
    ];
    let root = std::env::temp_dir().join(format!("phalanx-tensor-files-{}", std::process::id()));
    for (i, config) in configs.into_iter().enumerate() {
        let (alone, dtype) = (root.join(format!("{i}-alone")), [DType::F32, DType::BF16][i % 2]);
        let model = build(&config, OneDevice, dtype, Device::CPU).unwrap();
        phalanx_nn::models::save_model(&model, &config, &alone).unwrap();
        let whole: Vec<_> = model
            .parameters()
            .iter()
            .map(|p| (p.name().to_string(), phalanx_kernels::cast(&p.tensor(), DType::F64).unwrap()))
            .collect();
        for (tp, pp) in [(1, 1), (3, 1), (2, 2), (3, 2), (1, 3)] {
            let folder = root.join(format!("{i}-{tp}-{pp}"));
            let mesh = Mesh::new(tp, 1, pp).unwrap();
            launch::threads(tp * pp, |rank| -> Result<()> {
                let groups = Groups::new(mesh, rank.comm())?;
                let layers = Arc::new(TensorParallel::new(groups.along(Axis::Tp)));
                let config = read_config(&alone)?;
                // Another seed, so that what is not loaded shows.
                let scope = Scope::new(99, dtype, rank.device());
                let model = load_stage(&config, &alone, &layers, &scope, stage(&groups, config.layers()))?;
                for p in model.parameters() {
                    let values = phalanx_kernels::cast(&p.tensor(), DType::F64)?.to_vec::<f64>()?;
                    assert_eq!(values, part_of(&p, &whole), "{} over tp {tp}, pp {pp}", p.name());
                }
                if tp * pp > 1 {
                    let refused = phalanx_nn::models::save_model(&model, &config, &folder);
                    assert!(refused.unwrap_err().to_string().contains("part of a model"));
                }
                save_model(&model, &config, groups.model(), &folder)
            })
            .unwrap();
            for file in ["model.safetensors", "config.json"] {
                let read = |folder: &std::path::Path| std::fs::read(folder.join(file)).unwrap();
                assert!(read(&folder) == read(&alone), "{file} of {config:?} over tp {tp}, pp {pp}");
            }
        }
    }
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn ranks_that_hold_no_whole_model_are_told_what_is_missing() {
    let config = ModelConfig::Gpt(GptConfig::new(29, 8, 3, 6, 12));
    let folder = std::env::temp_dir().join(format!("phalanx-tensor-missing-{}", std::process::id()));
    let error = launch::threads(2, |rank| -> Result<()> {
        let pair = TensorParallel::new(rank.comm());
        let model = build(&config, pair, DType::F32, rank.device())?;
        // Each rank alone, where the two hold the model together.
        let own = rank.comm().group(&[rank.rank()])?;
        save_model(&model, &config, &own, folder.join(rank.rank().to_string())).map_err(|e| match e {
            Error::Config(why) if why.contains("the ranks hold") => Error::Config(why),
            other => Error::Config(format!("another error: {other}")),
        })
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("the ranks hold") && message.contains("elements"), "{message}");
}
