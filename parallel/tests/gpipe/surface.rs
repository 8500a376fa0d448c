//! What a pipeline is made of, what it shows, and what it refuses.

use phalanx_nn::autograd::Var;
use phalanx_nn::{Linear, LinearConfig, Module, Parameters, Scope, Sequential, SequentialConfig, state_dict};
use phalanx_parallel::pipeline::gpipe::{
    Batch, Checkpoint, GPipe, GPipeConfig, Partition, Sequence, gather, scatter,
};
use phalanx_tensor::{DType, Device};

use crate::kit::*;

fn linear(i: usize, device: Device) -> Linear {
    LinearConfig::new(2, 2).init(&Scope::new(1, DType::F64, device).child(i)).unwrap()
}

fn refused(model: Sequence, balance: &[usize], devices: &[Device], micro_batches: usize) -> String {
    let partition = Partition::new(balance, devices).unwrap();
    let made = GPipe::new(model, partition, GPipeConfig::new(micro_batches));
    made.err().map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn parameters_have_the_plain_models_names_whatever_the_balance() {
    let own = devices(3);
    let names =
        |model: &dyn Parameters| state_dict(model).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let wanted = names(&net(|_| Device::CPU));
    assert_eq!(wanted[..2], ["0.weight", "0.bias"]);
    for balance in [&[8][..], &[3, 5], &[1, 1, 6]] {
        let model = pipe(balance, &own, GPipeConfig::new(2));
        assert_eq!(names(&model), wanted);
        assert_eq!((model.len(), model.layers().len(), model.is_empty()), (8, 8, false));
        assert_eq!(model.devices(), own[..balance.len()], "devices beyond the stages are not used");
        let first = model.layers()[0].parameters();
        assert!(first[0].is(&model.parameters()[0]));
    }
}

#[test]
fn initial_values_do_not_depend_on_the_balance() {
    let own = devices(2);
    let values = |model: &dyn Parameters| -> Vec<Vec<f64>> {
        model.parameters().iter().map(|p| p.tensor().to_vec().unwrap()).collect()
    };
    assert_eq!(values(&pipe(&[3, 5], &own, GPipeConfig::new(2))), values(&net(|_| Device::CPU)));
}

#[test]
fn a_model_of_modules_becomes_a_pipeline() {
    let own = devices(1);
    let model = Sequential::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let twin = Sequential::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let model = GPipe::new(model.into(), Partition::new(&[2], &own).unwrap(), GPipeConfig::new(3)).unwrap();
    let x = constant(1, &[4, 2], own[0]);
    assert_eq!(bits(&model.forward(&x).unwrap()), bits(&twin.forward(&x).unwrap()));
}

#[test]
fn a_slice_of_modules_keeps_its_numbers_in_a_pipeline() {
    let own = devices(1);
    let scope = Scope::new(1, DType::F64, own[0]);
    let layers = SequentialConfig::new().with(LinearConfig::new(2, 2)).with(LinearConfig::new(2, 2));
    let slice = layers.slice(1..).unwrap().init(&scope).unwrap();
    let model = GPipe::new(slice.into(), Partition::new(&[1], &own).unwrap(), GPipeConfig::new(1)).unwrap();
    let names: Vec<String> = state_dict(&model).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["1.weight", "1.bias"]);
}

#[test]
fn a_balance_that_does_not_fit_is_refused() {
    let own = devices(2);
    let model = || Sequence::new().with(linear(0, own[0])).with(linear(1, own[0])).with(linear(2, own[0]));
    assert_eq!(
        refused(model(), &[2], &own, 1),
        "gpipe: got a balance of [2], which is 2 layers, wanted the model's 3"
    );
    assert!(refused(model(), &[2, 2], &own, 1).contains("[2, 2], which is 4 layers, wanted the model's 3"));
    assert_eq!(refused(model(), &[3], &own, 0), "gpipe: got 0 micro-batches, wanted at least 1");
    assert_eq!(refused(model(), &[3], &own, 1), "");
}

#[test]
fn a_parameter_on_another_device_than_its_layer_is_refused() {
    let own = devices(2);
    let model = Sequence::new().with(linear(0, own[0])).with(linear(1, own[0]));
    let message = refused(model, &[1, 1], &own, 1);
    let wanted = format!("gpipe: got 1.bias on {}, wanted it on {}, where its layer is", own[0], own[1]);
    assert_eq!(message, wanted);
}

#[test]
fn a_parameter_of_two_stages_is_refused_and_of_one_stage_is_not() {
    let own = devices(1);
    let shared = std::sync::Arc::new(linear(0, own[0]));
    let model = || Sequence::new().with(shared.clone()).with(shared.clone());
    let message = refused(model(), &[1, 1], &[own[0]; 2], 1);
    assert_eq!(message, "gpipe: 1.bias of stage 1 is 0.bias of stage 0; wanted one stage");
    assert_eq!(refused(model(), &[2], &own, 1), "");
}

#[test]
fn a_pipeline_without_layers_is_the_identity() {
    let model = GPipe::new(Sequence::new(), Partition::new(&[], &[]).unwrap(), GPipeConfig::new(4)).unwrap();
    let x = Var::scalar(42.0f64, Device::CPU).unwrap();
    assert_eq!(model.forward(&x).unwrap().item::<f64>().unwrap(), 42.0);
    assert!(model.is_empty());
}

#[test]
fn inputs_that_lie_elsewhere_or_do_not_fit_are_refused() {
    let own = devices(2);
    let model = each(vec![apply(Ok), apply(Ok)], &own, GPipeConfig::new(2));
    let message = |batch: Batch| model.run(batch).unwrap_err().to_string();
    let elsewhere = constant(1, &[2, 2], own[1]);
    let wanted = format!("gpipe: batch: got a value on {}, wanted it on {}", own[1], own[0]);
    assert_eq!(message(elsewhere.into()), wanted);
    let (x, y) = (constant(1, &[4, 2], own[0]), constant(1, &[3, 2], own[0]));
    assert_eq!(
        message([x, y].into()),
        "gpipe: batch: got values of shapes [[4, 2], [3, 2]], wanted the same number of rows in each"
    );
    assert!(message(Var::scalar(1.0f64, own[0]).unwrap().into()).contains("shapes [[]]"));
    assert!(message(Vec::new().into()).contains("shapes []"));
}

#[test]
fn a_layer_that_gets_or_makes_what_it_cannot_is_an_error() {
    let own = devices(2);
    let model = Sequence::new().with(linear(0, own[0]));
    let pipe = GPipe::new(model, Partition::new(&[1], &own).unwrap(), GPipeConfig::new(1)).unwrap();
    let x = constant(1, &[4, 2], own[0]);
    let message = pipe.run([x.clone(), x.clone()]).unwrap_err().to_string();
    assert!(message.ends_with("gpipe: batch: got 2 values, wanted one"), "{message}");
    let other = own[1];
    let strays = apply(move |b| Ok(b.map(|x| x.to_device(other))?));
    let message = each(vec![strays], &own, GPipeConfig::new(1)).run(&x).unwrap_err().to_string();
    assert!(message.contains(&format!("got a value on {}, wanted it on {}", own[1], own[0])), "{message}");
    let uneven = apply(|b: Batch| {
        let x = b.one()?;
        Ok(if x.shape()[0] == 1 { Batch::from(x) } else { Batch::from([x.clone(), x]) })
    });
    let message =
        each(vec![uneven], &own, GPipeConfig::new(2)).run(constant(1, &[3, 2], own[0])).unwrap_err();
    assert!(message.to_string().contains("micro-batches of [2, 1] values"), "{message}");
}

#[test]
fn indivisible_and_small_batches_are_cut_as_they_can_be() {
    let device = devices(1)[0];
    let sizes = |rows: usize, count| -> Vec<usize> {
        let pieces = scatter(&constant(1, &[rows, 2], device).into(), count).unwrap();
        pieces.iter().for_each(|(batch, rows)| assert_eq!(batch.rows().unwrap(), rows.len()));
        pieces.into_iter().map(|(_, rows)| rows.len()).collect()
    };
    assert_eq!(sizes(9, 8), [2, 2, 2, 2, 1]);
    assert_eq!(sizes(5, 4), [2, 2, 1]);
    assert_eq!(sizes(2, 4), [1, 1]);
    assert_eq!(sizes(8, 4), [2; 4]);
    assert_eq!(sizes(7, 1), [7]);
    assert_eq!(sizes(0, 3), [0]);
    let own = devices(2);
    for (rows, micro_batches) in [(7, 4), (2, 4), (1, 3)] {
        let model = each(vec![apply(Ok), apply(Ok)], &own, GPipeConfig::new(micro_batches));
        let x = constant(1, &[rows, 2], own[0]);
        assert_eq!(bits(&model.run(&x).and_then(Batch::one).unwrap()), bits(&x));
    }
}

#[test]
fn several_values_are_cut_and_joined_in_step() {
    let device = devices(1)[0];
    let (a, b) = (constant(1, &[5, 2], device), constant(2, &[5], device));
    let pieces = scatter(&[a.clone(), b.clone()].into(), 2).unwrap();
    let shapes: Vec<_> = pieces.iter().map(|(p, _)| (p[0].shape().to_vec(), p[1].shape().to_vec())).collect();
    assert_eq!(shapes, [(vec![3, 2], vec![3]), (vec![2, 2], vec![2])]);
    let [a2, b2] = gather(pieces.into_iter().map(|(p, _)| p).collect()).unwrap().many().unwrap();
    assert_eq!((bits(&a2), bits(&b2)), (bits(&a), bits(&b)));
}

#[test]
fn a_batch_is_one_value_or_several() {
    let device = devices(1)[0];
    let (x, y) = (constant(1, &[2], device), constant(2, &[2], device));
    let mut batch = Batch::from([x.clone(), y.clone()]);
    assert_eq!((batch.values().len(), bits(&batch[1])), (2, bits(&y)));
    batch[1] = x.clone();
    assert_eq!(bits(&batch[1]), bits(&x));
    let twice = batch.clone().map(|v| v.mul_scalar(2.0)).unwrap();
    assert_eq!(bits(&twice[0]), bits(&x.mul_scalar(2.0).unwrap()));
    assert!(batch.clone().one().unwrap_err().to_string().ends_with("got 2 values, wanted one"));
    assert!(batch.many::<3>().unwrap_err().to_string().ends_with("got 2 values, wanted 3"));
    assert_eq!(bits(&Batch::from(&y).one().unwrap()), bits(&y));
}

#[test]
fn the_settings_can_be_read() {
    let config = GPipeConfig::new(4).with_checkpoint(Checkpoint::Always);
    assert_eq!(format!("{config:?}"), "4 micro-batches, recomputed always, observed false");
    assert_eq!(Checkpoint::default(), Checkpoint::ExceptLast);
}
