//! Where the sequences of a micro-batch lie, on the device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::place::Place;

/// Rotary angles of every position, as cosines and sines.
#[derive(Clone, Debug)]
pub struct RotaryTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RotaryTable {
    /// A table of `cos` and `sin`, each `[positions, half]` in row-major order.
    ///
    /// # Panics
    /// If the two differ in length or do not hold whole rows.
    #[must_use]
    pub fn new(cos: Vec<f32>, sin: Vec<f32>, half: usize) -> Self {
        assert!(cos.len() == sin.len() && half > 0 && cos.len().is_multiple_of(half), "a rotary table has whole rows");
        Self { half, cos, sin }
    }

    /// Number of positions.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Cosine and sine of pair `pair` at `position`.
    #[must_use]
    pub fn at(&self, position: usize, pair: usize) -> (f32, f32) {
        let index = position * self.half + pair;
        (self.cos[index], self.sin[index])
    }
}

/// Where the sequences of a micro-batch lie: what attention and rotary embedding need to know.
#[derive(Clone, Debug)]
pub struct Layout {
    place: Place,
    rows: usize,
    row_length: usize,
    documents: Vec<(usize, usize)>,
    positions: Vec<u32>,
    table: std::sync::Arc<RotaryTable>,
    /// Cos and sin by token, `[tokens, half]`; for plain tensor calls.
    angles: Option<(Tensor<2>, Tensor<2>)>,
    /// `[rows, row_length]`; for plain tensor calls, if a row holds several documents.
    document_ids: Option<Tensor<2, Int>>,
}

impl Layout {
    /// A layout of `rows` rows of `row_length` tokens with `documents` (start, length) in them.
    ///
    /// `positions` are the tokens' positions within their documents, `[rows * row_length]`.
    #[must_use]
    pub fn new(
        place: Place,
        rows: usize,
        documents: Vec<(usize, usize)>,
        positions: Vec<u32>,
        table: std::sync::Arc<RotaryTable>,
        device: &Device,
    ) -> Self {
        let row_length = positions.len() / rows.max(1);
        let mut layout =
            Self { place, rows, row_length, documents, positions, table, angles: None, document_ids: None };
        if place != Place::Cpu {
            layout.make_tensors(device);
        }
        layout
    }

    fn make_tensors(&mut self, device: &Device) {
        let gather = |table: &[f32]| {
            let half = self.table.half;
            let values = self.positions.iter().flat_map(|&p| table[p as usize * half..][..half].iter().copied());
            let shape = [self.positions.len(), half];
            Tensor::<2>::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), (device, DType::F32))
        };
        let angles = (gather(&self.table.cos), gather(&self.table.sin));
        let several = self.documents.iter().any(|&(start, _)| !start.is_multiple_of(self.row_length));
        let document_ids = several.then(|| {
            let mut ids = vec![-1_i32; self.positions.len()];
            for (id, &(start, len)) in (0..).zip(&self.documents) {
                ids[start..start + len].fill(id);
            }
            Tensor::<2, Int>::from_data(TensorData::new(ids, [self.rows, self.row_length]), (device, DType::I32))
        });
        self.angles = Some(angles);
        self.document_ids = document_ids;
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens in a row.
    #[must_use]
    pub fn row_length(&self) -> usize {
        self.row_length
    }

    /// The ranges of tokens that attend only to themselves: (start, length) in flat tokens.
    #[must_use]
    pub fn documents(&self) -> &[(usize, usize)] {
        &self.documents
    }

    /// Position of every token within its document.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Where the model's operations run.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Cosine and sine of every position, `[positions, head_dim / 2]` each.
    #[must_use]
    pub fn table(&self) -> (&[f32], &[f32]) {
        (&self.table.cos, &self.table.sin)
    }

    /// Cosine and sine of every token, `[tokens, head_dim / 2]`.
    ///
    /// # Panics
    /// Outside [`Place::Plain`]: the kernels read the table.
    #[must_use]
    #[expect(clippy::expect_used, reason = "a layout of the plain path carries its angles by construction")]
    pub fn angles(&self) -> (Tensor<2>, Tensor<2>) {
        self.angles.clone().expect("a layout of the plain path carries its angles")
    }

    /// Which document each token belongs to, `[rows, row_length]`, if a row holds several.
    #[must_use]
    pub fn document_ids(&self) -> Option<Tensor<2, Int>> {
        self.document_ids.clone()
    }
}
