//! [`convert`]: deferred normalisation in the place of ordinary.

use std::any::Any;

use phalanx_nn::{BatchNorm, Module, Sequential};

use super::DeferredBatchNorm;

/// Puts a [`DeferredBatchNorm`] in the place of each [`BatchNorm`] of the sequence that keeps running statistics, in
/// sequences inside it too. Parameters, buffers and their names stay. A norm inside a module of another type is that
/// module's own: give it [`DeferredBatchNorm::of`] where it is made.
pub fn convert(layers: &mut Sequential) {
    layers.modules_mut().iter_mut().for_each(convert_layer);
}

fn convert_layer(layer: &mut Box<dyn Module>) {
    let any: &mut dyn Any = &mut **layer;
    if let Some(inner) = any.downcast_mut::<Sequential>() {
        convert(inner);
    } else if let Some(inner) = any.downcast_mut::<Box<dyn Module>>() {
        convert_layer(inner);
    } else if let Some(norm) = any.downcast_ref::<BatchNorm>().filter(|norm| norm.running_mean.is_some()) {
        *layer = Box::new(DeferredBatchNorm::of(norm));
    }
}
