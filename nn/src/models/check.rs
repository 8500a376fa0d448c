//! Checks of the sizes and numbers of a model's config.

/// The most blocks of a model: a damaged file may ask for any number.
pub(super) const LAYERS_MAX: usize = 1 << 16;

/// Refuses a size of 0.
pub(super) fn check_sizes(sizes: &[(&str, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(format!("{name} is 0, wanted at least 1")),
        None => Ok(()),
    }
}

/// Refuses a number of blocks that no model has.
pub(super) fn check_layers(layers: usize) -> Result<(), String> {
    match layers {
        1..=LAYERS_MAX => Ok(()),
        0 => Err("layers is 0, wanted at least 1".into()),
        _ => Err(format!("layers is {layers}, wanted at most {LAYERS_MAX}")),
    }
}

/// Refuses an eps or a standard deviation that is negative or too large for f32, and a dropout that is no probability.
pub(super) fn check_numbers(eps: f64, init_std: f64, dropout: &[f64]) -> Result<(), String> {
    let large = f64::from(f32::MAX);
    let named = [("eps", eps, large), ("init_std", init_std, large)];
    let numbers = named.into_iter().chain(dropout.iter().map(|&p| ("dropout", p, 1.0)));
    for (name, x, high) in numbers {
        if !(0.0..=high).contains(&x) {
            return Err(format!("{name} is {x:?}, wanted a number from 0 to {high:?}"));
        }
    }
    Ok(())
}
