//! Adapters with magnitudes beside weights in 8-bit blocks: the losses, weights and bytes of a CPU.

use std::sync::Arc;

use phalanx::nn::models::{
    BaseWeights, Decoder, DecoderStage, LlamaConfig, Lora, LoraConfig, ModelConfig, adapters, merged,
};
use phalanx::nn::{AdamW, CapturedStep, Group, Parameters, Result, Rule, Scope};
use phalanx::{DType, Device, Var, kernels};

const GPU: Device = Device::Cuda(0);
const STEPS: u64 = 4;

fn lora() -> LoraConfig {
    LoraConfig { dora: true, base: BaseWeights::Int8, ..LoraConfig::new(3, &["q_proj", "down_proj"]) }
}

fn model(device: Device) -> Result<Decoder<Lora>> {
    let config = ModelConfig::Llama(LlamaConfig::new(101, 24, 1, 4, 32));
    let layers: Arc<Lora> = lora().layers()?;
    config.init_stage(&layers, &Scope::new(1, DType::F32, device), DecoderStage::whole(1))
}

/// Losses, and the merged weights one after the other.
fn train(device: Device, capture: bool) -> Result<(Vec<f64>, Vec<f64>)> {
    let model = model(device)?;
    let mut optimizer = AdamW::default().init(vec![Group::new(adapters(&model), 1e-2)])?;
    let batch = |step: u64| -> Result<_> {
        Ok([super::ids(device, step)?, super::ids(device, step + 1)?].map(Var::into_tensor))
    };
    let loss = |batch: &[Var]| model.loss(&model.forward(&batch[0])?, &batch[1], 1.0 / 72.0);
    let mut captured = if capture { Some(CapturedStep::new(device, &batch(0)?, Some(1.0))?) } else { None };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        if let Some(captured) = &mut captured {
            captured.run(&mut optimizer, &batch(0)?, loss)?;
            losses.push(captured.results().to_vec::<f64>()?[0]);
            if captured.is_captured() != (step > 0) {
                let why = format!("step {step}: {:?}", captured.why_not_captured());
                return Err(phalanx::nn::Error::invalid("captured_step", why));
            }
            continue;
        }
        optimizer.zero_grad()?;
        let loss = loss(&batch(0)?.map(Var::new))?;
        loss.backward()?;
        let norm = phalanx::nn::grad_norm(&optimizer.parameters())?;
        optimizer.step_scaled(phalanx::nn::Clip::new(norm, 1.0).scale)?;
        losses.push(kernels::cast(loss.tensor(), DType::F64)?.item()?);
    }
    let mut weights = Vec::new();
    for (_, tensor) in merged(&model, &lora())? {
        weights.extend(kernels::cast(&tensor, DType::F64)?.to_vec::<f64>()?);
    }
    Ok((losses, weights))
}

/// Whether the same values have the same codes, scales and floats.
fn same_blocks() -> Result<bool> {
    let (cpu, gpu) = (model(Device::CPU)?, model(GPU)?);
    for (a, b) in cpu.parameters().iter().zip(gpu.parameters()).filter(|(p, _)| p.is_in_int8()) {
        let values = a.values()?;
        a.load(&values)?;
        b.load(&values)?;
        let pairs = a.held_in().into_iter().zip(b.held_in()).chain([(a.values()?, b.values()?)]);
        for (a, b) in pairs {
            if a.to_bytes()? != b.to_bytes()? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

pub fn train_as_on_the_cpu() -> std::result::Result<(), String> {
    let on = |device: Device, capture: bool| train(device, capture).map_err(|e| format!("on {device}: {e}"));
    if !same_blocks().map_err(|e| e.to_string())? {
        return Err("the blocks are not the CPU's".into());
    }
    let (cpu, gpu, captured) = (on(Device::CPU, false)?, on(GPU, false)?, on(GPU, true)?);
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
    for (what, other) in [("plain", &gpu), ("captured", &captured)] {
        let (losses, weights) = (apart(&cpu.0, &other.0), apart(&cpu.1, &other.1));
        println!("cuda: adapters, {what}: losses within {losses:.1e}, weights within {weights:.1e}");
        if losses > 1e-4 || weights > 1e-2 || other.0[STEPS as usize - 1] >= other.0[0] {
            return Err(format!("{what}: got {:?}, wanted {:?}", other.0, cpu.0));
        }
    }
    Ok(())
}
