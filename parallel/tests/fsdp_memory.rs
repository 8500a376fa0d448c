//! FSDP: how many units are gathered at a time, and how often, from the ledger and the traffic. Every test has a `meta` device of its own.

use phalanx_nn::autograd::{Var, checkpoint};
use phalanx_nn::models::{Decoder, GptConfig, LlamaConfig, ModelConfig, RecomputeMode};
use phalanx_nn::{
    AnyUnit, Linear, LinearConfig, Module, Parameters, Scope, WrappedUnit, Wrapping, parameters, wrap_by_size,
};
use phalanx_parallel::comm;
use phalanx_parallel::sharded::{BackwardPrefetch, Prefetch, Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_tensor::{Category, DType, Device, Tensor};

const WIDTH: usize = 512;
/// Bytes of a map.
const UNIT: usize = WIDTH * WIDTH * 2;
const RANKS: usize = 64;

type Map = WrappedUnit<Linear>;

fn map(name: &str, device: Device) -> Map {
    let scope = Scope::new(1, DType::BF16, device).child(name);
    WrappedUnit::of(LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&scope).unwrap())
}

fn maps(count: usize, device: Device) -> Vec<Map> {
    (0..count).map(|i| map(&i.to_string(), device)).collect()
}

fn input(device: Device) -> Var {
    Var::new(Tensor::zeros(&[1, WIDTH], DType::BF16, device).unwrap())
}

fn config(prefetch: Prefetch) -> ZeroConfig {
    ZeroConfig { prefetch, reshard: Reshard::Always, ..ZeroConfig::new(ZeroStage::Parameters) }
}

/// What a step takes over what is there between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// Bytes of values at the peak of the forward pass, and of the backward pass.
    values: [usize; 2],
    /// Bytes of gradients at the peak.
    gradients: usize,
    /// How many maps are gathered.
    gathers: usize,
}

/// `count` steps of a model of maps.
fn steps(model: &dyn Parameters, count: usize, config: ZeroConfig, output: &dyn Fn() -> Var) -> Vec<Step> {
    let device = model.parameters()[0].device();
    let ledger = device.ledger().unwrap();
    let zero = Zero::new(model, comm::meta(0, RANKS).unwrap(), config).unwrap();
    let step = |_| {
        let of = [Category::Parameters, Category::Gradients];
        let [values, gradients] = of.map(|category| ledger.category(category).now);
        let (sent, peak) = (zero.traffic().bytes, || ledger.category(Category::Parameters).peak - values);
        ledger.reset_peak();
        let loss = output().sum_all().unwrap();
        let forward = peak();
        ledger.reset_peak();
        zero.backward(&loss).unwrap();
        let (values, gradients) = ([forward, peak()], ledger.category(Category::Gradients).peak - gradients);
        zero.zero_grad().unwrap();
        // A rank sends its share of the values to all others, and all gradients but its share of them.
        let each = UNIT / RANKS * (RANKS - 1);
        let gathers = (zero.traffic().bytes - sent) as usize / each - model.parameters().len();
        Step { values, gradients, gathers }
    };
    (0..count).map(step).collect()
}

#[test]
fn as_many_units_are_gathered_at_a_time_as_depth_and_limit_say() {
    let device = Device::Meta(50);
    for (forward, limit) in (0..4).flat_map(|forward| (1..6).map(move |limit| (forward, limit))) {
        for backward in [BackwardPrefetch::Pre, BackwardPrefetch::Post, BackwardPrefetch::None] {
            let model = maps(8, device);
            let output = || model.iter().try_fold(input(device), |x, map| map.forward(&x)).unwrap();
            let prefetch = Prefetch { forward, backward, limit };
            let ahead = if backward == BackwardPrefetch::Pre { 2 } else { 1 };
            let values = [limit.min(1 + forward) * UNIT, limit.min(ahead) * UNIT];
            for (number, step) in steps(&model, 3, config(prefetch), &output).into_iter().enumerate() {
                assert_eq!(step.values, values, "{prefetch:?}, step {number}");
                assert_eq!(step.gathers, 16, "{prefetch:?}, step {number}");
            }
        }
    }
}

#[test]
fn what_is_used_in_another_order_is_gathered_once_a_pass_and_its_gradients_are_sent_as_they_come() {
    let device = Device::Meta(51);
    let model = maps(8, device);
    let other = [5, 2, 7, 0, 1, 6, 3, 4];
    let output = || other.iter().try_fold(input(device), |x, &i: &usize| model[i].forward(&x)).unwrap();
    let all = steps(&model, 4, config(Prefetch::default()), &output);
    assert!(all[0].gathers > 16, "the first pass has nothing but guesses");
    for step in &all[1..] {
        assert_eq!((step.values, step.gathers), ([2 * UNIT; 2], 16));
        // One that is computed, one under way, and the shards.
        assert!((2 * UNIT..2 * UNIT + UNIT / 4).contains(&step.gradients), "{step:?}");
    }
    assert!(all[0].gradients > 5 * UNIT, "{:?}", all[0]);
}

#[test]
fn what_is_not_used_is_not_gathered() {
    let device = Device::Meta(52);
    let model = maps(8, device);
    let output = || model.iter().step_by(2).try_fold(input(device), |x, map| map.forward(&x)).unwrap();
    let config = ZeroConfig { find_unused: true, ..config(Prefetch::default()) };
    let all = steps(&model, 3, config, &output);
    assert!(all[0].gathers > 8);
    assert!(all[1..].iter().all(|step| (step.values, step.gathers) == ([2 * UNIT; 2], 8)), "{all:?}");
}

/// Maps in a module, of which it may be a unit too: then it has a map of its own.
struct Block {
    own: Linear,
    parts: Vec<Map>,
}
parameters!(Block { own, parts });

impl Module for Block {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let x = self.parts.iter().try_fold(x.clone(), |x, part| part.forward(&x))?;
        self.own.forward(&x)
    }
}

fn blocks(device: Device) -> Vec<WrappedUnit<Block>> {
    let block = |i: usize| {
        let own = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        let own = own.init(&Scope::new(1, DType::BF16, device).child(format!("{i}.own"))).unwrap();
        let parts = (0..3).map(|part| map(&format!("{i}.{part}"), device)).collect();
        WrappedUnit::of(Block { own, parts })
    };
    (0..3).map(block).collect()
}

#[test]
fn units_in_a_unit_are_gathered_one_by_one_beside_what_is_the_outer_ones_own() {
    let device = Device::Meta(53);
    for (recompute, backward) in [false, true]
        .into_iter()
        .flat_map(|on| [BackwardPrefetch::Pre, BackwardPrefetch::Post].map(|at| (on, at)))
    {
        for (limit, units) in [(1, 2), (2, 3), (9, 3)] {
            let model = blocks(device);
            let output = || {
                let call = |x, block: &WrappedUnit<Block>| block.call(&x, recompute, |b, x| b.forward(x));
                model.iter().try_fold(input(device), call).unwrap()
            };
            let prefetch = Prefetch { limit, backward, ..Prefetch::default() };
            let units_back = if backward == BackwardPrefetch::Post { 2 } else { units };
            let all = steps(&model, 3, config(prefetch), &output);
            for step in &all[1..] {
                let wanted = [units * UNIT, units_back * UNIT];
                assert_eq!(step.values, wanted, "{prefetch:?}, recompute {recompute}");
                // Recomputation gathers the three parts of each block once more.
                assert_eq!(step.gathers, 24 + if recompute { 9 } else { 0 }, "{prefetch:?}");
            }
            assert!(all[0].values[1] <= units * UNIT, "{all:?}");
        }
    }
}

#[test]
fn the_last_part_that_is_recomputed_stays_for_its_backward_pass() {
    let device = Device::Meta(54);
    let model = blocks(device);
    let output = || {
        model.iter().try_fold(input(device), |x, block| block.call(&x, true, |b, x| b.forward(x))).unwrap()
    };
    let config = ZeroConfig { reshard: Reshard::ExceptLast, ..config(Prefetch::default()) };
    let all = steps(&model, 3, config, &output);
    // Of 33 gathers the last block's own map saves one, and the last part of each block one.
    assert!(all[1..].iter().all(|step| (step.values, step.gathers) == ([3 * UNIT; 2], 29)), "{all:?}");
}

#[test]
fn maps_recomputed_in_pairs_are_known_from_the_pass_before() {
    let device = Device::Meta(55);
    for (backward, units) in
        [(BackwardPrefetch::Pre, 2), (BackwardPrefetch::Post, 1), (BackwardPrefetch::None, 1)]
    {
        let model: Vec<std::sync::Arc<Map>> = maps(8, device).into_iter().map(Into::into).collect();
        let output = || {
            let pairs = model.chunks(2).try_fold(input(device), |x, pair| {
                let pair = pair.to_vec();
                let maps = move |x: &[Var]| pair.iter().try_fold(x[0].clone(), |x, map| map.forward(&x));
                checkpoint(move |x| Ok(maps(x)?), &[&x])
            });
            pairs.unwrap()
        };
        let prefetch = Prefetch { backward, ..Prefetch::default() };
        for step in &steps(&model, 3, config(prefetch), &output)[1..] {
            // Forward, recomputed, backward; under `Pre` the first of a pair is gathered ahead for its backward pass when it has left.
            assert_eq!((step.values, step.gathers), ([2 * UNIT, units * UNIT], 24), "{backward:?}");
        }
    }
}

fn bytes(model: &(impl Parameters + ?Sized)) -> usize {
    model.parameters().iter().map(|p| 2 * p.tensor().numel()).sum()
}

/// Of each of a model's units, in the order of use: the bytes of the units around it, and its own without those of units inside it.
fn units(model: &dyn Parameters) -> Vec<(usize, usize)> {
    fn inside(unit: &dyn AnyUnit, units: &mut Vec<(usize, usize)>) -> usize {
        let place = units.len();
        let all = bytes(unit);
        let mut inner = 0;
        if !unit.is_wrapped() {
            unit.visit_inner_units(&mut |unit| inner += inside(unit, units));
            return inner;
        }
        units.push((0, 0));
        unit.visit_inner_units(&mut |unit| inner += inside(unit, units));
        units[place].1 = all - inner;
        units[place + 1..].iter_mut().for_each(|(around, _)| *around += all - inner);
        all
    }
    let mut found = Vec::new();
    model.visit_units(&mut |unit| {
        inside(unit, &mut found);
    });
    found
}

/// The bytes of gathered values at the peak of the second step.
fn decoder_peak(model: &Decoder) -> usize {
    let (device, rows) = (model.device(), [2, model.context()]);
    let zero =
        Zero::new(model, comm::meta(0, RANKS).unwrap(), ZeroConfig::new(ZeroStage::Parameters)).unwrap();
    let ledger = device.ledger().unwrap();
    let rest = ledger.category(Category::Parameters).now;
    for _ in 0..2 {
        ledger.reset_peak();
        let tokens = Var::new(Tensor::empty(&rows, DType::I64, device).unwrap());
        zero.backward(&model.loss(&model.forward(&tokens).unwrap(), &tokens, 1.0).unwrap()).unwrap();
        zero.zero_grad().unwrap();
    }
    ledger.category(Category::Parameters).peak - rest
}

#[test]
fn a_decoder_gathers_two_of_the_parts_that_its_blocks_are_wrapped_in() {
    let gpt = ModelConfig::Gpt(GptConfig { tied: false, ..GptConfig::new(8, 4, 4, 2, 128) });
    let llama =
        ModelConfig::Llama(LlamaConfig { tied: false, key_heads: 1, ..LlamaConfig::new(8, 4, 4, 2, 128) });
    for (config, mode) in [&gpt, &llama]
        .into_iter()
        .flat_map(|config| [RecomputeMode::Never, RecomputeMode::Always].map(|mode| (config, mode)))
    {
        let peak_of = |wrap: &dyn Fn(&mut Decoder)| {
            let mut model = config.init(&Scope::new(1, DType::BF16, Device::Meta(56))).unwrap();
            model.set_recompute(mode);
            wrap(&mut model);
            let units = units(&model);
            let pair = |pair: &[(usize, usize)]| pair[0].0 + pair[0].1 + pair[1].1;
            // The root is gathered as a whole.
            let root = bytes(&model) - units.iter().map(|(_, own)| own).sum::<usize>();
            let wanted = root + units.windows(2).map(pair).max().unwrap();
            let peak = decoder_peak(&model);
            assert_eq!(peak, wanted, "{mode:?}, {units:?}");
            peak
        };
        let blocks = peak_of(&|_| ());
        assert_eq!(peak_of(&|model| model.set_wrapping(Wrapping::Blocks)), blocks);
        let halves = peak_of(&|model| model.set_wrapping(Wrapping::Halves));
        let maps = peak_of(&|model| model.set_wrapping(Wrapping::Maps));
        let large = peak_of(&|model| wrap_by_size(model, 128 * 128 * 2));
        assert!(2 * halves <= blocks + blocks / 10 && maps < halves && large < blocks);
    }
}

/// Ranks keep shards of codes and scales and gather a unit's at a time, and no graph keeps them until backward.
#[test]
fn matrices_in_8_bit_blocks_are_gathered_as_their_codes_and_scales() {
    let device = Device::Meta(90);
    let model = maps(8, device);
    let blocks = WIDTH * WIDTH + WIDTH * WIDTH.div_ceil(64) * 4;
    for map in &model[1..] {
        map.parameters()[0].hold_in_int8().unwrap();
    }
    let ledger = device.ledger().unwrap();
    let values = || ledger.category(Category::Parameters);
    let zero = Zero::new(&model, comm::meta(0, RANKS).unwrap(), config(Prefetch::default())).unwrap();
    let shards = values().now;
    assert_eq!(shards, (UNIT + 7 * blocks) / RANKS);
    for _ in 0..3 {
        ledger.reset_peak();
        let y = model.iter().try_fold(input(device), |x, map| map.forward(&x)).unwrap();
        assert_eq!(values().now, shards);
        zero.backward(&y.sum_all().unwrap()).unwrap();
        assert_eq!((values().now, values().peak), (shards, shards + UNIT + blocks));
        zero.zero_grad().unwrap();
    }
}
