//! Codes of eight bits with a dynamic exponent (Dettmers, 2016), and the code that is nearest to a number.

/// The codes, sorted by the numbers that they stand for, and the middles between neighbours.
pub struct Nearest<const N: usize> {
    order: [u8; N],
    /// The middles, ascending.
    pub middles: Vec<f32>,
}

impl<const N: usize> Nearest<N> {
    /// Of the numbers by code.
    #[must_use]
    pub fn new(table: &[f32; N]) -> Self {
        let mut order: [u8; N] = std::array::from_fn(|code| code as u8);
        // Minus zero is not below zero, whose code is the lower.
        let number = |code: u8| table[usize::from(code)] + 0.0;
        order.sort_by(|a, b| number(*a).total_cmp(&number(*b)));
        let sorted = order.map(|code| table[usize::from(code)]);
        Self { order, middles: sorted.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect() }
    }

    /// The code of the nearest number; of two, the lower.
    #[must_use]
    pub fn code(&self, x: f32) -> u8 {
        self.order[self.middles.partition_point(|middle| *middle < x)]
    }
}

/// The 256 numbers of codes with a dynamic exponent, ascending: for each of seven powers of ten, the middles of equal parts of
/// 0.1 to 1, twice as many for each larger power; and 0 and 1. Without a sign there are twice as many parts.
#[must_use]
pub fn dynamic_table(is_signed: bool) -> [f32; 256] {
    let mut numbers = vec![0.0, 1.0];
    for exponent in 0..7 {
        let power = 10f32.powi(exponent - 6);
        let parts = if is_signed { 1usize } else { 2 } << exponent;
        let boundary = |i: usize| {
            let step = 0.9f32 / parts as f32;
            // From the nearer end, rounded once, as torch.linspace computes it.
            if 2 * i < parts + 1 { step.mul_add(i as f32, 0.1) } else { (-step).mul_add((parts - i) as f32, 1.0) }
        };
        for part in 0..parts {
            let middle = power * f32::midpoint(boundary(part), boundary(part + 1));
            numbers.push(middle);
            numbers.extend(is_signed.then_some(-middle));
        }
    }
    numbers.sort_by(f32::total_cmp);
    std::array::from_fn(|code| numbers[code])
}
