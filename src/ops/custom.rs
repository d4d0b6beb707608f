//! Operations of our own on GPUs, in burn's queue: in order with burn's operations, and as lazy as they are.

use burn::backend::fusion::FusionRuntime;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, OperationFn, OperationIr, StreamId, TensorIr, TensorSpec,
};
use burn::backend::fusion::{FusionBackend, FusionTensor};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

type Runtime = <CubeBackend as FusionBackend>::FusionRuntime;
type Handles = HandleContainer<<Runtime as FusionRuntime>::FusionHandle>;

/// The type and shape of a tensor.
pub(super) fn spec(dtype: DType, shape: impl Into<Shape>) -> TensorSpec {
    TensorSpec::new(shape.into(), dtype)
}

/// The GPU of a tensor; `None` for one in host memory.
pub(super) fn device_of(tensor: &DispatchTensor) -> Option<CubeDevice> {
    match &tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor) | BackendTensor::Int(tensor)) => {
            Some(tensor.client.device().clone())
        }
        _ => None,
    }
}

/// A result of an operation.
pub(super) enum Output {
    /// A new tensor.
    New(TensorSpec),
    /// A new matrix whose columns follow those of the result before it, in the same memory.
    Beside(TensorSpec),
    /// The input of this number, with other values, contiguous.
    Changed(usize),
    /// Likewise, but its rows may have gaps: what lies there is left alone.
    ChangedColumns(usize),
}

/// Matrices side by side, `[rows, width]` each, with the rows and in the type of `like`.
pub(super) fn side_by_side(like: &Tensor<2>, widths: impl IntoIterator<Item = usize>) -> Vec<Output> {
    let specs = widths.into_iter().map(|width| spec(like.dtype(), [like.dims()[0], width]));
    specs.enumerate().map(|(index, spec)| if index == 0 { Output::New(spec) } else { Output::Beside(spec) }).collect()
}

/// Queues an operation: `run` gets the inputs, and contiguous tensors for the outputs, without values, to fill.
///
/// It is called when burn comes to it, on a thread of burn's. Inputs are as burn left them: views and rows with gaps, too.
///
/// # Panics
/// If a tensor is not on a GPU, or autodiff tracks it.
pub(super) fn custom<const N: usize, const M: usize>(
    name: &'static str,
    inputs: [DispatchTensor; N],
    outputs: [TensorSpec; M],
    run: impl Fn([CubeTensor; N], &[CubeTensor; M]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    custom_of(name, inputs, outputs.map(Output::New).into(), run)
}

/// [`custom`] with results of any kind.
pub(super) fn custom_of<const N: usize, const M: usize>(
    name: &'static str,
    inputs: [DispatchTensor; N],
    outputs: Vec<Output>,
    run: impl Fn([CubeTensor; N], &[CubeTensor; M]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    array(queue(name, inputs.into(), outputs, move |inputs, outputs| run(array(inputs), reference(outputs))))
}

/// Queues an operation that gives `changed` other values: `as_changed` is [`Output::Changed`] or [`Output::ChangedColumns`].
pub(super) fn change<const N: usize, const M: usize>(
    name: &'static str,
    as_changed: fn(usize) -> Output,
    changed: [DispatchTensor; M],
    inputs: [DispatchTensor; N],
    run: impl Fn(&[CubeTensor; M], [CubeTensor; N]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    let outputs = (0..M).map(as_changed).collect();
    let inputs = changed.into_iter().chain(inputs).collect();
    array(queue(name, inputs, outputs, move |inputs, outputs| run(reference(outputs), array(inputs))))
}

/// Queues an operation with any number of inputs: `run` gets those that are not changed, the first of them apart, and the outputs.
pub(super) fn launch<const N: usize, const M: usize>(
    name: &'static str,
    inputs: impl IntoIterator<Item = DispatchTensor>,
    outputs: [Output; M],
    run: impl Fn([CubeTensor; N], Vec<CubeTensor>, &[CubeTensor; M]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    let run = move |inputs: Vec<CubeTensor>, outputs: &[CubeTensor]| {
        let (first, others) = first_of(inputs);
        run(first, others, reference(outputs));
    };
    array(queue(name, inputs.into_iter().collect(), outputs.into(), run))
}

/// Queues an operation with any number of outputs, too: `run` gets the inputs that are not changed, and the outputs.
///
/// A result that is [`Output::ChangedColumns`] is changed in place if nothing uses the tensor afterwards. Nothing else may have
/// a view of it.
pub(super) fn queue(
    name: &'static str,
    inputs: Vec<DispatchTensor>,
    outputs: Vec<Output>,
    run: impl Fn(Vec<CubeTensor>, &[CubeTensor]) + Send + Sync + 'static,
) -> Vec<DispatchTensor> {
    let (inputs, is_float): (Vec<_>, Vec<_>) = inputs.into_iter().map(fused).unzip();
    let client = inputs[0].client.clone();
    let written = |output: Output| {
        let spec = match &output {
            Output::New(spec) | Output::Beside(spec) => spec.clone(),
            Output::Changed(index) | Output::ChangedColumns(index) => {
                spec(inputs[*index].dtype, inputs[*index].shape.clone())
            }
        };
        (TensorIr::uninit(client.create_empty_handle(), spec.shape, spec.dtype), output)
    };
    let outputs: Vec<_> = outputs.into_iter().map(written).collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let created = outputs.iter().map(|(output, _)| output.clone()).collect();
    let (id, scalars) = (name.into(), Vec::new());
    let description = CustomOpIr { id, inputs: inputs.clone(), outputs: created, scalars };
    let work = move |handles: &mut Handles| {
        let get = |(input, is_float): (&TensorIr, &bool)| {
            let tensor = match is_float {
                true => handles.get_float_tensor::<CubeBackend>(input),
                false => handles.get_int_tensor::<CubeBackend>(input),
            };
            Some(Input { tensor, is_last_use: handles.get_handle_ref(&input.id).is_none() })
        };
        let mut inputs: Vec<_> = inputs.iter().zip(&is_float).map(get).collect();
        let results = results(&outputs, &mut inputs);
        run(inputs.into_iter().flatten().map(|input| input.tensor).collect(), &results);
        for ((output, _), result) in outputs.iter().zip(results) {
            if output.dtype.is_float() {
                handles.register_float_tensor::<CubeBackend>(&output.id, result);
            } else {
                handles.register_int_tensor::<CubeBackend>(&output.id, result);
            }
        }
        Ok(())
    };
    let queued = client.register(StreamId::current(), OperationIr::Custom(description), OperationFn(work));
    let wrapped = queued.into_iter().map(|tensor| {
        let tensor = if tensor.dtype.is_float() { BackendTensor::Float(tensor) } else { BackendTensor::Int(tensor) };
        DispatchTensor { kind: DispatchTensorKind::Cube(tensor), autodiff: DispatchAutodiffContext::Disabled }
    });
    wrapped.collect()
}

/// An input whose turn has come.
struct Input {
    tensor: CubeTensor,
    /// Nothing reads it afterwards.
    is_last_use: bool,
}

/// The tensors to fill, without the values that are to come. Takes the inputs that are changed.
fn results(outputs: &[(TensorIr, Output)], inputs: &mut [Option<Input>]) -> Vec<CubeTensor> {
    let mut results: Vec<CubeTensor> = Vec::with_capacity(outputs.len());
    let Some((client, device)) =
        inputs.iter().flatten().next().map(|x| (x.tensor.client.clone(), x.tensor.device.clone()))
    else {
        return results;
    };
    for (index, (output, kind)) in outputs.iter().enumerate() {
        let new = |shape| empty_device_contiguous_dtype(client.clone(), device.clone(), shape, output.dtype);
        let mut taken = |index: usize| inputs[index].take().unwrap_or_else(|| unreachable!("it is changed once"));
        let result = match kind {
            Output::New(_) => {
                let beside = outputs[index + 1..].iter().take_while(|(_, kind)| matches!(kind, Output::Beside(_)));
                match beside.map(|(output, _)| output.shape[1]).sum::<usize>() {
                    0 => new(output.shape.clone()),
                    more => columns(&new(Shape::new([output.shape[0], output.shape[1] + more])), 0, output.shape[1]),
                }
            }
            Output::Beside(_) => {
                let before = &results[index - 1];
                columns(before, before.meta.shape()[1], output.shape[1])
            }
            Output::Changed(index) => {
                let tensor = into_contiguous(taken(*index).tensor);
                if tensor.can_mut() { tensor } else { into_contiguous(tensor.copy()) }
            }
            Output::ChangedColumns(index) => match taken(*index) {
                Input { tensor, is_last_use } if tensor.can_mut() || is_last_use && has_gaps(&tensor) => tensor,
                Input { tensor, .. } => into_contiguous(tensor.copy()),
            },
        };
        results.push(result);
    }
    results
}

/// Whether its rows are contiguous, but not one behind the other.
fn has_gaps(matrix: &CubeTensor) -> bool {
    matrix.meta.strides()[1] == 1 && matrix.meta.strides()[0] > matrix.meta.shape()[1]
}

/// `width` columns of the memory of `matrix`, from its column `first` on.
pub(super) fn columns(matrix: &CubeTensor, first: usize, width: usize) -> CubeTensor {
    let (rows, stride, size) = (matrix.meta.shape()[0], matrix.meta.strides()[0], matrix.dtype.size());
    let mut part = matrix.clone();
    let start = part.handle.offset_start.unwrap_or(0) + (first * size) as u64;
    (part.handle.offset_start, part.handle.offset_end) = (Some(start), None);
    let behind = part.handle.size_in_used() - ((rows.saturating_sub(1) * stride + width) * size) as u64;
    part.handle.offset_end = Some(behind);
    part.meta.shape = Shape::new([rows, width]);
    part
}

/// The first of some, and the others.
pub(super) fn first_of<T, const N: usize>(mut all: Vec<T>) -> ([T; N], Vec<T>) {
    let others = all.split_off(N);
    (array(all), others)
}

fn array<T, const N: usize>(all: Vec<T>) -> [T; N] {
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for"))
}

fn reference<const N: usize>(all: &[CubeTensor]) -> &[CubeTensor; N] {
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for"))
}

/// A tensor as burn's queue knows it, and whether it holds floating-point numbers.
fn fused(tensor: DispatchTensor) -> (FusionTensor<Runtime>, bool) {
    match tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) => (tensor, true),
        DispatchTensorKind::Cube(BackendTensor::Int(tensor)) => (tensor, false),
        _ => panic!("an operation of a GPU takes tensors on it"),
    }
}
