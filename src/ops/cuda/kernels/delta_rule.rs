//! The gated delta rule by the kernels of `delta_rule.cu`: what chunks do by themselves at once, the states along the documents.

use burn::tensor::{DType, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::matrix::{rows, scratch, stride};
use super::stream::{Launch, note_memory, tiles_in_flight};
use crate::ops::custom::{columns, custom, spec};
use crate::ops::layout::ChunkTable;
use crate::ops::plain::delta_rule::chunks::CHUNK_TOKENS;
use crate::ops::plain::delta_rule::{DeltaInputs, Gates};
use crate::spec::DeltaHeads;

const MODULE: &str = "delta_rule";

/// Columns of a state that a block has, as the kernels were compiled.
const SLICE: usize = 32;
/// Threads of blocks that go along documents or prepare chunks, and of the others.
const THREADS: usize = 128;
const MORE_THREADS: usize = 256;
/// Queries and keys of a block of `delta_rule_backward_keys`.
const WARPS: usize = 8;
/// Dynamic shared memory in bytes, as the kernels say; of the last two the first number is that before compute capability 8.0.
const OF_PREPARE: usize = 33_280;
const OF_STATES: usize = 40_960;
const OF_BACKWARD_CHUNKS: usize = 61_440;
const OF_FORWARD: [usize; 2] = [61_440, 69_632];
const OF_BACKWARD_STATES: [usize; 2] = [57_344, 65_536];

/// The operands of all kernels.
struct Operands {
    qkv: CubeTensor,
    decay: CubeTensor,
    strength: CubeTensor,
    chunks: CubeTensor,
    documents: CubeTensor,
    num_chunks: usize,
    num_documents: usize,
    heads: DeltaHeads,
}

/// What is the same in the forward and in the backward.
struct Prepared {
    sums: CubeTensor,
    factors: CubeTensor,
    inverse: CubeTensor,
    weights: CubeTensor,
}

impl Operands {
    fn new(inputs: [CubeTensor; 5], [num_chunks, num_documents]: [usize; 2], heads: DeltaHeads) -> Self {
        let [qkv, decay, strength, chunks, documents] = inputs;
        let [decay, strength] = [decay, strength].map(into_contiguous);
        Self { qkv: rows(qkv), decay, strength, chunks, documents, num_chunks, num_documents, heads }
    }

    fn prepared(&self) -> Prepared {
        let DeltaHeads { num_key_heads, num_value_heads, .. } = self.heads;
        let of_values = |len: usize, dtype| scratch(&self.qkv, [self.num_chunks * num_value_heads * len], dtype);
        let factors = scratch(&self.qkv, [self.num_chunks * num_key_heads * 2 * CHUNK_TOKENS], DType::F32);
        let [inverse, weights] = [0, 1].map(|_| of_values(CHUNK_TOKENS * CHUNK_TOKENS, self.qkv.dtype));
        let prepared = Prepared { sums: of_values(CHUNK_TOKENS, DType::F32), factors, inverse, weights };
        let grid = [self.num_chunks, num_key_heads, 1];
        let launch = Launch::new(MODULE, "delta_rule_prepare", grid, THREADS).shared(OF_PREPARE);
        let launch = launch.read(&self.qkv).read(&self.decay).read(&self.strength).read(&self.chunks);
        let Prepared { sums, factors, inverse, weights } = &prepared;
        let launch = [sums, factors, inverse, weights].into_iter().fold(launch, Launch::write);
        launch.ints([stride(&self.qkv), num_key_heads, num_value_heads]).launch();
        prepared
    }

    /// A kernel whose blocks go along documents.
    fn along(&self, name: &str, shared: usize) -> Launch {
        let grid = [self.heads.value_width() / SLICE, self.num_documents, 1];
        Launch::new(MODULE, name, grid, THREADS).shared(shared)
    }

    /// With what most of them read.
    fn read(&self, launch: Launch, Prepared { sums, factors, inverse, .. }: &Prepared) -> Launch {
        let of_tokens = launch.read(&self.strength).read(&self.chunks).read(&self.documents);
        of_tokens.read(sums).read(factors).read(inverse)
    }

    /// Of these sizes of shared memory the one for the GPU.
    fn of_gpu(&self, shared: [usize; 2]) -> usize {
        shared[tiles_in_flight(&self.qkv) - 1]
    }

    fn sizes(&self) -> [usize; 3] {
        [self.heads.num_key_heads, self.heads.num_value_heads, self.heads.value_head_dim]
    }

    fn forward(&self, o: &CubeTensor) {
        let prepared = self.prepared();
        let launch = self.read(self.along("delta_rule_forward", self.of_gpu(OF_FORWARD)).read(&self.qkv), &prepared);
        launch.read(&prepared.weights).write(o).ints([stride(&self.qkv)]).ints(self.sizes()).launch();
    }

    fn backward(&self, d_o: &CubeTensor, [dqkv, d_decay, d_strength]: &[CubeTensor; 3]) {
        let (prepared, heads, qkv) = (self.prepared(), self.heads, &self.qkv);
        let DeltaHeads { num_key_heads, num_value_heads, key_head_dim, .. } = heads;
        let tokens = qkv.meta.shape()[0];
        let of_tokens = || scratch(qkv, [tokens, heads.value_width()], qkv.dtype);
        let of_chunks = || scratch(qkv, [self.num_chunks * num_value_heads * heads.state_len()], qkv.dtype);
        let (written, d_known, states, d_states) = (of_tokens(), of_tokens(), of_chunks(), of_chunks());
        let launch = self.read(self.along("delta_rule_states", OF_STATES).read(qkv), &prepared);
        launch.write(&written).write(&states).ints([stride(qkv)]).ints(self.sizes()).launch();

        let dv = columns(dqkv, 2 * heads.key_width(), heads.value_width());
        let along = self.along("delta_rule_backward_states", self.of_gpu(OF_BACKWARD_STATES));
        let launch = self.read(along.read(d_o).read(qkv), &prepared);
        let launch = launch.read(&prepared.weights).write(&d_known).write(&d_states).write(&dv);
        launch.ints([stride(d_o), stride(qkv), stride(dqkv)]).ints(self.sizes()).launch();

        let by_head = || scratch(qkv, [tokens, num_value_heads * key_head_dim], DType::F32);
        let (d_queries, d_keys) = (by_head(), by_head());
        let grid = [self.num_chunks, num_value_heads, 1];
        let launch = Launch::new(MODULE, "delta_rule_backward_chunks", grid, MORE_THREADS).shared(OF_BACKWARD_CHUNKS);
        let read =
            [&self.strength, &self.chunks, &prepared.sums, &prepared.factors, &written, &d_known, &states, &d_states];
        let launch = read.into_iter().fold(launch.read(d_o).read(qkv), Launch::read);
        let launch = [&d_queries, &d_keys, d_decay, d_strength].into_iter().fold(launch, Launch::write);
        launch.ints([stride(d_o), stride(qkv)]).ints(self.sizes()).launch();

        let grid = [(tokens * num_key_heads * 2).div_ceil(WARPS), 1, 1];
        let launch = Launch::new(MODULE, "delta_rule_backward_keys", grid, MORE_THREADS);
        let launch = launch.read(qkv).read(&d_queries).read(&d_keys).write(dqkv);
        launch.ints([stride(qkv), stride(dqkv), tokens, num_key_heads, num_value_heads]).launch();
        note_memory(qkv);
    }
}

/// [`delta_rule`](crate::ops::delta_rule::delta_rule) of `bf16`.
pub(super) fn forward(inputs: DeltaInputs<'_>) -> Tensor<2> {
    let heads = inputs.heads;
    let ChunkTable { chunks, documents, num_chunks, num_documents } =
        inputs.layout.chunk_table(CHUNK_TOKENS, &inputs.qkv.device());
    let outputs = [spec(inputs.qkv.dtype(), [inputs.qkv.dims()[0], heads.value_width()])];
    let [qkv, decay, strength] =
        [inputs.qkv, &inputs.gates.decay, &inputs.gates.strength].map(|x| x.clone().into_dispatch());
    let inputs = [qkv, decay, strength, chunks.into_dispatch(), documents.into_dispatch()];
    let [o] = custom("delta_rule", inputs, outputs, move |inputs, [o]| {
        Operands::new(inputs, [num_chunks, num_documents], heads).forward(o);
    });
    Tensor::from_dispatch(o)
}

/// [`delta_rule_backward`](crate::ops::delta_rule::delta_rule_backward) of `bf16`.
pub(super) fn backward(d_o: &Tensor<2>, inputs: DeltaInputs<'_>) -> (Tensor<2>, Gates<Tensor<2>>) {
    let heads = inputs.heads;
    let ChunkTable { chunks, documents, num_chunks, num_documents } =
        inputs.layout.chunk_table(CHUNK_TOKENS, &inputs.qkv.device());
    let of_gates = spec(DType::F32, inputs.gates.decay.dims());
    let outputs = [spec(inputs.qkv.dtype(), inputs.qkv.dims()), of_gates.clone(), of_gates];
    let [d_o, qkv, decay, strength] =
        [d_o, inputs.qkv, &inputs.gates.decay, &inputs.gates.strength].map(|x| x.clone().into_dispatch());
    let inputs = [d_o, qkv, decay, strength, chunks.into_dispatch(), documents.into_dispatch()];
    let run = move |[d_o, qkv, decay, strength, chunks, documents]: [CubeTensor; 6], outputs: &[CubeTensor; 3]| {
        let inputs = [qkv, decay, strength, chunks, documents];
        Operands::new(inputs, [num_chunks, num_documents], heads).backward(&rows(d_o), outputs);
    };
    let [dqkv, decay, strength] = custom("delta_rule_backward", inputs, outputs, run).map(Tensor::from_dispatch);
    (dqkv, Gates { decay, strength })
}
