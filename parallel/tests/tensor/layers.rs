//! The layers by themselves: values, gradients, initial values, and what runs while ranks exchange. What cannot be split is
//! refused with the reason, and an error on one rank ends all.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use phalanx_nn::autograd::{Leaf, Options, Slot, Var, backward_inputs, grad};
use phalanx_nn::models::{
    Decoder, Experts, Family, Generation, GptConfig, LlamaConfig, ModelConfig, TransformerConfig,
    generate_rows,
};
use phalanx_nn::{
    EmbeddingConfig, EmbeddingSpec, HeadsNormSpec, Init, LayerFactory, LinearConfig, LinearSpec, Module,
    OneDevice, Parameter, Parameters, RmsNorm, RmsNormConfig, SampleOptions, Scope,
};
use phalanx_parallel::tensor_parallel::{
    ColumnParallelLinear, HeadsParallelRmsNorm, RowParallelLinear, TensorParallel, VocabParallelEmbedding,
};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{DType, Device, Tensor};

use crate::kit::{Cut, LENGTH, assert_close, build, gpt, llama, loss, part_of};

fn scope(device: Device) -> Scope {
    Scope::new(11, DType::F64, device).child("layer")
}

fn map(inputs: usize, outputs: &[usize]) -> LinearSpec<'_> {
    LinearSpec { inputs, outputs, bias: true, init: Init::KaimingUniform { gain: 1.0 }, whole: false }
}

fn numbers(shape: &[usize], device: Device) -> Result<Tensor> {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i: usize| (i as f64 * 0.37).sin()).collect();
    Ok(Tensor::from_slice(&values, shape, device)?)
}

/// Output, the input's gradient, and the parameters with their gradients, for a gradient of sines.
type Found = (Vec<f64>, Vec<f64>, Vec<(String, Tensor)>);

fn run(layer: &dyn Module, x: &[usize], device: Device) -> Result<Found> {
    let x = Var::leaf(numbers(x, device)?)?;
    let y = layer.forward(&x)?;
    y.backward_with(Var::new(numbers(y.shape(), device)?))?;
    let grads = layer.parameters().into_iter().map(|p| Ok((p.name().to_string(), p.grad()?.unwrap())));
    Ok((y.to_vec()?, x.grad().unwrap().to_vec()?, grads.collect::<Result<_>>()?))
}

/// Gives biases values, which are otherwise 0 and would hide that they are added twice.
fn set_biases(parameters: &[Parameter]) -> Result<()> {
    for p in parameters.iter().filter(|p| p.name().ends_with("bias")) {
        let whole = numbers(&p.part().whole_shape(1), p.device())?;
        p.load(&p.part().of(&whole)?.with_shape(p.tensor().shape())?)?;
    }
    Ok(())
}

/// Two sums of `terms` numbers, whose sizes add up to `size`, in different orders of additions: panics if they are further apart than both
/// can be from the exact sum. Source: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1.
fn assert_same_sum(what: &str, got: f64, wanted: f64, terms: usize, size: f64) {
    let roundings = terms as f64 * f64::EPSILON / 2.0;
    let bound = 2.0 * roundings / (1.0 - roundings) * size;
    assert!((got - wanted).abs() <= bound, "{what}: {got:e}, wanted {wanted:e}, within {bound:e}");
}

/// What is a sum over all ranks in a linear map that is cut.
#[derive(Clone, Copy, PartialEq)]
enum Cuts {
    /// Of a map that is cut by its outputs: the input's gradient.
    Columns,
    /// Of a map that is cut by its inputs: the output.
    Rows,
}

const INPUTS: usize = 7;
const OUTPUTS: usize = 8;

/// Holds a layer that is made on 3 ranks, and gives whole outputs of whole inputs, against one device's. All but the sum over the ranks, and
/// the gradient of a bias that is cut, has its bits.
fn assert_like_linear(cuts: Cuts, make: fn(&TensorParallel, &Scope) -> phalanx_nn::Result<Box<dyn Module>>) {
    let spec = map(INPUTS, &[OUTPUTS]);
    let alone = LinearConfig::new(INPUTS, OUTPUTS).with_init(spec.init).init(&scope(Device::CPU)).unwrap();
    set_biases(&alone.parameters()).unwrap();
    let shape = [2, 3, INPUTS];
    let (y, dx, grads) = run(&alone, &shape, Device::CPU).unwrap();
    let values = |t: &Tensor| t.to_vec::<f64>().unwrap();
    let (w, b) = (values(&alone.weight.tensor()), values(&alone.bias.as_ref().unwrap().tensor()));
    let (x, dy) = (
        values(&numbers(&shape, Device::CPU).unwrap()),
        values(&numbers(&[6, OUTPUTS], Device::CPU).unwrap()),
    );
    let weight = |output: usize, input: usize| w[output * INPUTS + input];
    launch::threads(3, |rank| -> Result<()> {
        let layer = make(&TensorParallel::new(rank.comm()), &scope(rank.device()))?;
        set_biases(&layer.parameters())?;
        let (own_y, own_dx, own_grads) = run(&*layer, &shape, rank.device())?;
        if cuts == Cuts::Columns {
            assert_eq!(own_y, y);
            for (at, (&got, &wanted)) in own_dx.iter().zip(&dx).enumerate() {
                let (row, k) = (at / INPUTS, at % INPUTS);
                let size = (0..OUTPUTS).map(|j| (dy[row * OUTPUTS + j] * weight(j, k)).abs()).sum();
                assert_same_sum("dx", got, wanted, OUTPUTS, size);
            }
        } else {
            assert_eq!(own_dx, dx);
            for (at, (&got, &wanted)) in own_y.iter().zip(&y).enumerate() {
                let (row, j) = (at / OUTPUTS, at % OUTPUTS);
                let size: f64 = (0..INPUTS).map(|k| (x[row * INPUTS + k] * weight(j, k)).abs()).sum();
                assert_same_sum("y", got, wanted, INPUTS + 1, size + b[j].abs());
            }
        }
        for (parameter, (name, grad)) in layer.parameters().iter().zip(&own_grads) {
            let (own, whole) = (grad.to_vec::<f64>()?, part_of(parameter, &grads));
            if cuts == Cuts::Columns && name.ends_with("bias") {
                // The order in which rows are added depends on how many columns there are. Their elements are 1 at most.
                let rows = shape[0] * shape[1];
                own.iter().zip(&whole).for_each(|(&a, &b)| assert_same_sum(name, a, b, rows, rows as f64));
            } else {
                assert_eq!(own, whole, "{name}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_column_cut_map_that_gathers_has_the_maps_bits_but_for_gradients_of_input_and_bias() {
    assert_like_linear(Cuts::Columns, |group, scope| {
        Ok(Box::new(ColumnParallelLinear::new(group, scope, map(7, &[8]))?.gather_output()?))
    });
}

#[test]
fn a_row_cut_map_that_scatters_has_the_maps_bits_but_for_the_output_and_adds_its_bias_once() {
    assert_like_linear(Cuts::Rows, |group, scope| {
        Ok(Box::new(RowParallelLinear::new(group, scope, map(7, &[8]))?.scatter_input()))
    });
}

#[test]
fn a_column_whose_output_is_wanted_everywhere_is_the_map_on_every_rank() {
    let alone = LinearConfig::new(7, 8).with_init(map(7, &[8]).init).init(&scope(Device::CPU)).unwrap();
    let (y, ..) = run(&alone, &[2, 6, 7], Device::CPU).unwrap();
    for cut in Cut::both(3) {
        launch::threads(3, |rank| -> Result<()> {
            let group = cut.layers(rank.comm());
            let whole = LinearSpec { whole: true, ..map(7, &[8]) };
            let layer = ColumnParallelLinear::new(&group, &scope(rank.device()), whole)?;
            let here = group.stream(6)?;
            let x = Var::new(numbers(&[2, 6, 7], rank.device())?).narrow(1, here.start, here.len())?;
            assert_eq!(layer.forward(&x)?.to_vec::<f64>()?, y);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn initial_values_are_parts_of_one_devices_whatever_the_ranks() {
    let inits = [
        Init::Normal { mean: 0.0, std: 0.02 },
        Init::TruncatedNormal { mean: 0.0, std: 1.0 },
        Init::XavierUniform { gain: 1.0 },
        Init::KaimingNormal { gain: 2.0 },
    ];
    for init in inits {
        let column = LinearSpec { init, ..map(10, &[8, 8, 8]) };
        let (row, table) = (
            LinearSpec { init, ..map(10, &[6]) },
            EmbeddingSpec { count: 11, width: 5, init, tied: true, padding: Some(7) },
        );
        fn build<L: LayerFactory>(
            layers: &L,
            at: &Scope,
            column: LinearSpec<'_>,
            row: LinearSpec<'_>,
            table: EmbeddingSpec,
        ) -> Vec<Parameter> {
            let column = layers.column(&at.child("column"), column).unwrap().parameters();
            let row = layers.row(&at.child("row"), row).unwrap().parameters();
            let table = layers.embedding(&at.child("table"), table).unwrap().parameters();
            [column, row, table].concat()
        }
        let whole = build(&OneDevice, &scope(Device::CPU), column, row, table);
        let whole: Vec<_> = whole.iter().map(|p| (p.name().to_string(), p.tensor())).collect();
        for ranks in 1..=5 {
            launch::threads(ranks, |rank| -> Result<()> {
                let group = TensorParallel::new(rank.comm());
                for p in build(&group, &scope(rank.device()), column, row, table) {
                    assert_eq!(p.tensor().to_vec::<f64>()?, part_of(&p, &whole), "{}", p.name());
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn a_cut_table_gives_the_bits_of_the_whole_even_of_negative_zeros() {
    let config = EmbeddingConfig::new(11, 3);
    let alone = config.init(&scope(Device::CPU)).unwrap();
    let negative = |p: &Parameter| {
        let mut row = p.tensor().narrow(0, 0, 1).unwrap();
        phalanx_kernels::fill_(&mut row, -0.0).unwrap();
    };
    negative(&alone.weight);
    let indices = [0i64, 10, 4, 4, 0, 7];
    let x = Var::from_slice(&indices, &[2, 3], Device::CPU).unwrap();
    let y = alone.forward(&x).unwrap();
    y.backward_with(Var::new(numbers(&[2, 3, 3], Device::CPU).unwrap())).unwrap();
    let whole = [("layer.weight".to_string(), alone.weight.grad().unwrap().unwrap())];
    launch::threads(3, |rank| -> Result<()> {
        let table = EmbeddingSpec {
            count: 11,
            width: 3,
            init: Init::Normal { mean: 0.0, std: 1.0 },
            tied: false,
            padding: None,
        };
        let layer =
            VocabParallelEmbedding::new(&TensorParallel::new(rank.comm()), &scope(rank.device()), table)?;
        if rank.rank() == 0 {
            negative(&layer.weight);
        }
        let own = layer.forward(&Var::from_slice(&indices, &[2, 3], rank.device())?)?;
        assert_eq!(own.tensor().to_bytes()?, y.tensor().to_bytes()?);
        own.backward_with(Var::new(numbers(&[2, 3, 3], rank.device())?))?;
        assert_eq!(layer.weight.grad()?.unwrap().to_vec::<f64>()?, part_of(&layer.weight, &whole));
        let unknown = layer.forward(&Var::from_slice(&[11i64], &[1, 1], rank.device())?);
        assert!(unknown.map(drop).unwrap_err().to_string().contains("index 11"));
        Ok(())
    })
    .unwrap();
}

/// Columns over 2 ranks, whose weights accumulate into buffers: the buffers, the gradient of x, whatever the pass.
fn accumulated(sequence: bool, pass: fn(&Var, Var, &Var) -> Result<Vec<f64>>) -> Vec<Vec<f64>> {
    let run = |rank: launch::Rank| -> Result<Vec<f64>> {
        let group = TensorParallel::new(rank.comm()).with_sequence_parallel(sequence);
        let at = scope(rank.device());
        let maps = [("a", [4]), ("b", [6])]
            .map(|(name, out)| ColumnParallelLinear::new(&group, &at.child(name), map(5, &out)));
        let [a, b] = maps.map(|map| map.unwrap());
        for leaf in [&a, &b].iter().flat_map(|map| map.parameters()).flat_map(|p| p.leaves().to_vec()) {
            leaf.set_slot(Slot::Into(numbers(leaf.tensor().shape(), rank.device())?))?;
        }
        let here = group.stream(4)?;
        let x = numbers(&[2, 4, 5], rank.device())?.narrow(1, here.start, here.len())?.copy()?;
        let x = Var::leaf(x)?;
        let ys = ColumnParallelLinear::apply(&[&a, &b], &x)?;
        let y = Var::cat(&ys, -1)?;
        let dy = Var::new(numbers(y.shape(), rank.device())?);
        let mut found = pass(&y, dy, &x)?;
        for p in [&a, &b].iter().flat_map(|map| map.parameters()) {
            found.extend(p.grad()?.unwrap().to_vec::<f64>()?);
        }
        Ok(found)
    };
    launch::threads(2, run).unwrap()
}

#[test]
fn weights_accumulate_into_buffers_alike_in_joint_split_and_recorded_passes() {
    for sequence in [false, true] {
        let joint = accumulated(sequence, |y, dy, x| {
            y.backward_with(dy)?;
            Ok(x.grad().unwrap().to_vec()?)
        });
        let split = accumulated(sequence, |y, dy, x| {
            let later = backward_inputs(&[(y.clone(), Some(dy))])?;
            let dx = x.grad().unwrap().to_vec()?;
            later.run()?;
            Ok(dx)
        });
        assert_eq!(joint, split);
        let recorded = accumulated(sequence, |y, dy, x| {
            let options = Options { create_graph: true, ..Options::default() };
            let dx = grad(&[(y.clone(), Some(dy.clone()))], &[x], options)?.remove(0).unwrap();
            y.backward_with(dy)?;
            Ok(dx.to_vec()?)
        });
        for (joint, recorded) in joint.iter().zip(&recorded) {
            assert_close("recorded", recorded, joint, 1e-14);
        }
    }
}

/// Rank 1 does not begin its backward pass before rank 0 has its weight's gradient, for which rank 0 would wait forever if
/// it waited for the sum of the input's gradient first.
#[test]
fn the_weights_gradient_is_computed_while_the_inputs_is_exchanged() {
    let first: OnceLock<Leaf> = OnceLock::new();
    launch::threads(2, |rank| -> Result<()> {
        let layer = ColumnParallelLinear::new(
            &TensorParallel::new(rank.comm()),
            &scope(rank.device()),
            map(5, &[4]),
        )?;
        let leaf = layer.weight.leaves()[0].clone();
        leaf.set_slot(Slot::Into(Tensor::zeros(&[2, 5], DType::F64, rank.device())?))?;
        let x = Var::leaf(numbers(&[1, 3, 5], rank.device())?)?;
        let y = layer.forward(&x)?;
        if rank.rank() == 0 {
            let _ = first.set(leaf);
        } else {
            let begin = Instant::now();
            let is_there = || match first.get().and_then(Leaf::grad) {
                Some(grad) => Ok(grad.to_vec::<f64>()?.iter().any(|x| *x != 0.0)),
                None => Ok::<_, phalanx_nn::autograd::Error>(false),
            };
            while !is_there()? {
                assert!(begin.elapsed() < Duration::from_secs(20), "rank 0 has no gradient of its weight");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(y.sum_all()?.backward()?)
    })
    .unwrap();
}

#[test]
fn layouts_are_checked_before_anything_is_made() {
    let check = |config: ModelConfig, ranks, positions| {
        TensorParallel::check(&config, ranks, positions).map_err(|e| e.to_string())
    };
    assert_eq!(check(gpt(6, 0.0), 3, Some(LENGTH)), Ok(()));
    assert_eq!(
        check(llama(6, 2, 0.0), 3, Some(LENGTH)),
        Ok(()),
        "key heads that cannot be cut are everywhere"
    );
    let cases = [
        (gpt(6, 0.0), 4, None, "attention heads: got 6 to cut over 4 ranks, wanted a multiple of 4"),
        (gpt(6, 0.0), 3, Some(10), "positions: got 10 to cut over 3 ranks, wanted a multiple of 3"),
        (gpt(6, 0.0), 0, None, "got no ranks"),
        (ModelConfig::Gpt(GptConfig::new(2, 4, 1, 3, 6)), 3, None, "vocabulary: got 2 to cut over 3 ranks"),
        (
            ModelConfig::Llama(LlamaConfig { inner: 2, ..LlamaConfig::new(9, 4, 1, 3, 6) }),
            3,
            None,
            "inner features: got 2 to cut over 3 ranks",
        ),
    ];
    for (config, ranks, positions, wanted) in cases {
        let message = check(config, ranks, positions).unwrap_err();
        assert!(message.contains(wanted), "{message}");
    }
}

/// The error of a run of two ranks.
fn error(f: impl Fn(launch::Rank) -> Result<()> + Sync) -> String {
    launch::threads(2, f).unwrap_err().to_string()
}

#[test]
fn models_and_inputs_that_cannot_be_cut_are_refused() {
    let odd = error(|rank| {
        build(&gpt(3, 0.0), TensorParallel::new(rank.comm()), DType::F32, rank.device()).map(drop)
    });
    assert!(odd.contains("attention heads: got 3 to cut over 2 ranks"), "{odd}");
    let sequence = error(|rank| {
        let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(true);
        let model = build(&gpt(4, 0.0), layers, DType::F32, rank.device())?;
        let tokens = Var::new(Tensor::zeros(&[1, 5], DType::I64, rank.device())?);
        Ok(model.forward(&tokens).map(drop)?)
    });
    assert!(sequence.contains("positions: got 5 to cut over 2 ranks"), "{sequence}");
    let sections = error(|rank| {
        let init = Init::ZEROS;
        let map = LinearSpec { inputs: 4, outputs: &[4, 2], bias: false, init, whole: false };
        let at = Scope::new(1, DType::F32, rank.device()).child("odd");
        Ok(ColumnParallelLinear::new(&TensorParallel::new(rank.comm()), &at, map).map(drop)?)
    });
    assert!(sections.contains("odd: got sections of [4, 2] outputs"), "{sections}");
    let flat = error(|rank| {
        let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(true);
        let map = LinearSpec { inputs: 4, outputs: &[4], bias: false, init: Init::ZEROS, whole: false };
        let layer = ColumnParallelLinear::new(&layers, &Scope::new(1, DType::F32, rank.device()), map)?;
        Ok(layer.forward(&Var::new(Tensor::zeros(&[3, 4], DType::F32, rank.device())?)).map(drop)?)
    });
    assert!(flat.contains("got [3, 4] between layers, wanted [B, T, ..]"), "{flat}");
}

#[test]
fn an_error_in_one_ranks_backward_pass_ends_all_with_its_cause() {
    let message = error(|rank| {
        let model = build(&gpt(4, 0.0), TensorParallel::new(rank.comm()), DType::F32, rank.device())?;
        let loss = loss(&model, 0, 0..2)?;
        let first = &phalanx_nn::Parameters::parameters(&model)[4];
        let (name, broken) = (first.name().to_string(), rank.rank() == 1);
        let _hook = first.var().on_grad(move |_| match broken {
            true => Err(phalanx_nn::autograd::Error::Custom(format!("{name} is broken"))),
            false => Ok(None),
        });
        Ok(loss.backward()?)
    });
    assert!(message.contains("rank 1 failed") && message.contains("is broken"), "{message}");
}

/// With sequence parallelism too: one new position cannot be cut, so the stream is whole meanwhile, and cut again afterwards.
#[test]
fn ranks_that_have_some_heads_each_generate_the_tokens_of_one_device() {
    fn tokens<L: LayerFactory>(model: &Decoder<L>) -> Result<Vec<Vec<u32>>> {
        let generation =
            Generation::new(6).with_sampling(SampleOptions { temperature: 0.0, ..SampleOptions::default() });
        let rows =
            generate_rows(model, &[vec![7, 250, 31], vec![9], vec![1, 2, 3, 4]], generation, |_| true)?;
        Ok(rows.into_iter().map(|row| row.tokens).collect())
    }
    let olmo = TransformerConfig::new(Family::OlmoE, 256, LENGTH, 2, 4, 48);
    let experts = olmo.experts.clone().map(|experts| Experts { count: 4, chosen: 2, inner: 16, ..experts });
    let olmo = ModelConfig::Transformer(TransformerConfig { experts, ..olmo });
    for config in [gpt(4, 0.1), llama(4, 2, 0.1), olmo] {
        let wanted = tokens(&build(&config, OneDevice, DType::F64, Device::CPU).unwrap()).unwrap();
        for sequence in [false, true] {
            let on_rank = |rank: launch::Rank| -> Result<_> {
                let layers = TensorParallel::new(rank.comm()).with_sequence_parallel(sequence);
                let model = build(&config, layers, DType::F64, rank.device())?;
                let tokens = tokens(&model)?;
                let mut caches = model.caches(1, 4)?;
                let three = Var::from_slice(&[7i64, 250, 31], &[1, 3], rank.device())?;
                assert_eq!(model.extend(&three, &mut caches)?.shape(), [1, 256]);
                assert_eq!(model.stream(1, 12)?.0[1], if sequence { 6 } else { 12 });
                Ok(tokens)
            };
            assert_eq!(launch::threads(2, on_rank).unwrap(), [wanted.clone(), wanted.clone()]);
        }
    }
}

/// A norm of 12 features, of which ranks have parts: output, gradients, and the gradient of a gradient.
#[test]
fn a_norm_over_the_features_of_all_ranks_is_one_devices() {
    const SHAPE: [usize; 3] = [2, 3, 12];
    fn found(norm: &dyn Module, x: &Tensor, dy: &Tensor) -> Result<[Vec<f64>; 4]> {
        let (x, dy) = (Var::leaf(x.copy()?)?, Var::new(dy.clone()));
        let weight = norm.parameters().swap_remove(0);
        let (y, w) = (norm.forward(&x)?, weight.var());
        let seeds = [(y.clone(), Some(dy.clone()))];
        let options = Options { create_graph: true, ..Options::default() };
        let mut first = grad(&seeds, &[&x, &w], options)?.into_iter().flatten();
        let (dx, dw) = (first.next().unwrap(), first.next().unwrap());
        let again = dx.mul(&dy.sin()?)?.sum_all()?;
        let second = grad(&[(again, None)], &[&x], Options::default())?.swap_remove(0).unwrap();
        Ok([y.to_vec()?, dx.to_vec()?, dw.to_vec()?, second.to_vec()?])
    }
    fn fill(weight: &Parameter) -> Result<()> {
        let whole = numbers(&[SHAPE[2]], weight.device())?;
        Ok(weight.load(&weight.part().of(&whole)?)?)
    }
    let (x, dy) = (numbers(&SHAPE, Device::CPU).unwrap(), numbers(&[2, 3, 13], Device::CPU).unwrap());
    let dy = dy.narrow(2, 1, 12).unwrap().copy().unwrap();
    for (ranks, plus_one) in [(2, false), (3, true)] {
        let config = RmsNormConfig::new(&SHAPE[2..]).with_eps(1e-3).with_plus_one(plus_one);
        let alone: RmsNorm = config.init(&scope(Device::CPU)).unwrap();
        fill(alone.weight.as_ref().unwrap()).unwrap();
        let wanted = found(&alone, &x, &dy).unwrap();
        let on_rank = |rank: launch::Rank| -> Result<[Vec<f64>; 4]> {
            let spec = HeadsNormSpec { features: SHAPE[2], eps: 1e-3, plus_one };
            let norm =
                HeadsParallelRmsNorm::new(&TensorParallel::new(rank.comm()), &scope(rank.device()), spec)?;
            fill(&norm.weight)?;
            let own = |x: &Tensor| {
                x.narrow(2, 12 / ranks * rank.rank(), 12 / ranks)?
                    .contiguous()?
                    .to_device(rank.device(), false)
            };
            let found = found(&norm, &own(&x)?, &own(&dy)?)?;
            let odd = Var::new(Tensor::zeros(&[2, 5], DType::F64, rank.device())?);
            let refused = norm.forward(&odd).unwrap_err().to_string();
            assert!(refused.contains("heads_parallel_rms_norm: got [2, 5] f64 and a weight"), "{refused}");
            Ok(found)
        };
        let parts = launch::threads(ranks, on_rank).unwrap();
        for (which, wanted) in wanted.iter().enumerate() {
            let own = 12 / ranks;
            let side_by_side = (0..wanted.len() / 12)
                .flat_map(|row| parts.iter().flat_map(move |part| part[which][row * own..][..own].to_vec()));
            assert_close(&format!("{which} over {ranks}"), &side_by_side.collect::<Vec<_>>(), wanted, 1e-13);
        }
    }
    let refused = launch::threads(5, |rank| -> Result<()> {
        let spec = HeadsNormSpec { features: 12, eps: 0.0, plus_one: false };
        Ok(HeadsParallelRmsNorm::new(&TensorParallel::new(rank.comm()), &scope(rank.device()), spec)
            .map(drop)?)
    });
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("layer: features: got 12 to cut over 5 ranks"), "{refused}");
}
