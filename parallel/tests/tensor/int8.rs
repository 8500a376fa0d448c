//! States of matrices in 8-bit blocks, which ZeRO-3 spreads.

use phalanx_kernels as kernels;
use phalanx_nn::models::{BaseWeights, Decoder, Lora, LoraConfig};
use phalanx_nn::{OneDevice, Parameter, Parameters};
use phalanx_parallel::digest::whole_digests;
use phalanx_parallel::sharded::{FullStateDict, Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, comm, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::{build, llama};

/// Floats for a whole model, codes and scales for parts.
#[test]
fn weights_in_int8_have_one_devices_states() {
    let (config, base) = (llama(4, 1, 0.1), BaseWeights::Int8);
    let lora = LoraConfig { base, ..LoraConfig::new(3, &["q_proj", "down_proj"]) };
    let layers = || Lora::new(OneDevice, lora.clone()).unwrap();
    let values_of = |model: &Decoder<Lora>| {
        let bytes = |p: &Parameter| (p.name().to_string(), p.values().unwrap().to_bytes().unwrap());
        model.parameters().iter().map(bytes).collect::<Vec<_>>()
    };
    let alone = build(&config, layers(), DType::F32, Device::CPU).unwrap();
    let held =
        alone.parameters().iter().map(|p| ShardedTensor::held_in(p).unwrap()).collect::<Vec<_>>().concat();
    let digests = whole_digests(&comm::meta(0, 1).unwrap(), &held).unwrap().of;
    let stages = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
    let of_stage = |rank: launch::Rank, stage: ZeroStage| -> Result<()> {
        let alone = build(&config, layers(), DType::F32, rank.device())?;
        let model = build(&config, layers(), DType::F32, rank.device())?;
        let zero = Zero::new(&model, rank.comm().clone(), ZeroConfig::new(stage))?;
        let int8: Vec<Parameter> = model.parameters().into_iter().filter(Parameter::is_in_int8).collect();
        assert_eq!(int8.len(), 4 * 7);
        let is_spread =
            |p: &Parameter| p.held_in().iter().all(|t| t.why_withheld().is_some()) && p.values().is_err();
        assert!(int8.iter().all(|p| is_spread(p) == (stage == ZeroStage::Parameters)));
        assert_eq!(whole_digests(rank.comm(), &zero.sharded_state_dict()?)?.of, digests);
        let bytes = |entries: Vec<(String, Tensor)>| {
            entries.into_iter().map(|(name, tensor)| (name, tensor.to_bytes().unwrap())).collect::<Vec<_>>()
        };
        let everywhere = FullStateDict { rank0_only: false, ..FullStateDict::default() };
        let whole = zero.full_state_dict_with(everywhere)?;
        assert_eq!(bytes(whole.clone()), values_of(&alone));
        let other =
            |(name, tensor): &(String, Tensor)| Ok((name.clone(), kernels::mul_scalar(tensor, 0.7.into())?));
        let others = whole.iter().map(other).collect::<Result<Vec<_>>>()?;
        alone.parameters().iter().zip(&others).try_for_each(|(p, (_, values))| p.load(values))?;
        let values = values_of(&alone);
        zero.load_full_state_dict(others)?;
        assert_eq!(bytes(zero.full_state_dict_with(everywhere)?), values);
        let copied = |(name, tensor): (String, Tensor)| Ok((name, tensor.copy()?));
        let local = zero.local_state_dict()?.into_iter().map(copied).collect::<Result<_>>()?;
        zero.load_full_state_dict(whole)?;
        zero.load_local_state_dict(local)?;
        {
            let _here = zero.gathered()?;
            assert_eq!(values_of(&model), values);
        }
        assert!(int8.iter().all(|p| is_spread(p) == (stage == ZeroStage::Parameters)));
        zero.load_sharded_state_dict(&held)?;
        assert_eq!(whole_digests(rank.comm(), &zero.sharded_state_dict()?)?.of, digests);
        Ok(())
    };
    for stage in stages {
        launch::threads(3, |rank| of_stage(rank, stage)).unwrap();
    }
}
