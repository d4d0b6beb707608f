//! What is right in itself, and wrong beside what another section says.

use super::{Purpose, Recipe};
use crate::config::{BestBy, Init, LrScheduler, ObjectiveName, OptimizerName, Quantization};
use crate::schema::{Choice as _, Problem, Section};

fn reject(root: &mut Section<'_>, key: &str, message: impl Into<String>, hint: impl Into<String>) {
    root.reject(key, Problem::new(message).hint(hint));
}

impl Recipe {
    /// Checks that the sections do not contradict each other.
    pub(super) fn hold_together(&self, root: &mut Section<'_>, purpose: Purpose) {
        self.hold_rows(root, purpose);
        self.hold_best(root);
        self.hold_adapters(root);
        self.hold_schedule(root);
        self.hold_objective(root);
        self.hold_shipping(root);
    }

    /// There are rows to train on and to evaluate with.
    fn hold_rows(&self, root: &mut Section<'_>, purpose: Purpose) {
        let (data, eval) = (&self.data, &self.eval);
        // A wrong value has its own problem already, so it does not count as absent here.
        let has_train = !data.train.is_empty() || root.is_wrong("data.train");
        let has_eval_split = data.eval_split.is_some() || root.is_wrong("data.eval_split");
        // `eval` names rows on its command line.
        let is_training = purpose != Purpose::Benchmark;
        let has_eval = !data.eval.is_empty() || root.is_wrong("data.eval") || has_eval_split || !is_training;
        let has_eval_steps = eval.eval_steps.is_some() || root.is_wrong("eval.eval_steps");

        if is_training && !has_train {
            reject(root, "data", "there is no training data", "add [[data.train]] with the `path` of a file");
        }
        let need_rows = [
            ("eval_steps", eval.eval_steps.is_some() && eval.generate.is_empty()),
            ("max_batches", eval.max_batches.is_some()),
            ("early_stopping_patience", eval.early_stopping_patience.is_some()),
            ("task.metric", eval.task.metric.is_some()),
        ];
        for (key, _) in need_rows.into_iter().filter(|(_, is_set)| *is_set && !has_eval) {
            let message = format!("`eval.{key}` needs evaluation data, and there is none");
            reject(root, &format!("eval.{key}"), message, "add [[data.eval]], or `eval_split` in [data]");
        }
        if eval.early_stopping_patience.is_some() && has_eval && !has_eval_steps {
            let message = "`eval.early_stopping_patience` needs evaluations during training";
            reject(root, "eval.early_stopping_patience", message, "set `eval_steps` in [eval]");
        }
    }

    /// What makes an evaluation the best is measured.
    fn hold_best(&self, root: &mut Section<'_>) {
        let Some(by) = self.eval.metric_for_best else { return };
        let is_grpo = self.objective.name == ObjectiveName::Grpo;
        let has_pairs = self.objective.name != ObjectiveName::CrossEntropy && !is_grpo;
        let of_pairs = ("is measured on pairs of answers", "set `name = \"dpo\"` in [objective], or leave it out");
        let (message, hint) = match by {
            BestBy::Score if self.eval.task.metric.is_none() => {
                ("needs a task, and there is none", "set `metric` in [eval.task]")
            }
            BestBy::Reward if !is_grpo => ("is that of the answers of \"grpo\"", "use \"loss\""),
            BestBy::Loss if is_grpo => ("says nothing of \"grpo\", whose loss is about 0", "use \"reward\""),
            BestBy::Accuracy if !self.objective.rows().is_pair() => of_pairs,
            BestBy::Margin if !has_pairs => of_pairs,
            _ => return,
        };
        let message = format!("`eval.metric_for_best` = \"{}\" {message}", by.word());
        reject(root, "eval.metric_for_best", message, hint);
    }

    /// Base, objective and optimizer can do with what the adapters bring.
    fn hold_adapters(&self, root: &mut Section<'_>) {
        let lora = &self.lora;
        if lora.starts_in_base() && self.model.quantization != Quantization::None {
            let message = "`lora.init_lora_weights`: the adapter would start as a part of the base, which cannot be taken out of \
                           a quantised one";
            let hint = "leave `model.quantization` out, or use init_lora_weights = true";
            reject(root, "lora.init_lora_weights", message, hint);
        }
        if self.objective.scores() && lora.modules_to_save.is_some() {
            let message = "`lora.modules_to_save`: a model that scores texts has a head of its own for that";
            let hint = "take it out: that head is trained, and saved, without it";
            reject(root, "lora.modules_to_save", message, hint);
        }
        if self.optimizer.name != OptimizerName::Muon {
            return;
        }
        if lora.use_dora {
            let message = "`optimizer.name` = \"muon\" trains matrices, and `lora.use_dora` brings vectors";
            reject(root, "optimizer.name", message, "use \"adamw\", or take `use_dora` out");
        }
        let brings = [
            ("modules_to_save", lora.modules_to_save.is_some()),
            ("trainable_token_indices", lora.trainable_token_indices.is_some()),
        ];
        for (key, _) in brings.into_iter().filter(|(_, is_set)| *is_set) {
            let message = format!(
                "`optimizer.name` = \"muon\" trains matrices of hidden layers, and `lora.{key}` brings embeddings or norms"
            );
            reject(root, "optimizer.name", message, format!("use \"adamw\", or take `{key}` out"));
        }
    }

    /// The schedule has a use for its keys, and steps to go over.
    fn hold_schedule(&self, root: &mut Section<'_>) {
        let scheduler = &self.scheduler;
        if let kind @ (LrScheduler::Constant | LrScheduler::InverseSqrt) = scheduler.lr_scheduler
            && scheduler.min_lr_ratio > 0.0
        {
            let message = format!("`scheduler.min_lr_ratio` has no meaning with `lr_scheduler` = \"{}\"", kind.word());
            reject(root, "scheduler.min_lr_ratio", message, "take it out, or use `cosine` or `linear`");
        }
        if let (Some(warmup), Some(steps)) = (scheduler.warmup_steps, self.train.max_steps)
            && warmup >= steps
        {
            let message = format!("`scheduler.warmup_steps` = {warmup} leaves none of `train.max_steps` = {steps}");
            reject(root, "scheduler.warmup_steps", message, "make it smaller, or use `warmup_ratio`");
        }
    }

    /// The rows and the other sections are what the objective learns from.
    fn hold_objective(&self, root: &mut Section<'_>) {
        let (is_grpo, scores) = (self.objective.name == ObjectiveName::Grpo, self.objective.scores());
        let objective = self.objective.name.word();
        if self.objective.name != ObjectiveName::CrossEntropy && self.data.train_on_inputs {
            let message =
                format!("`data.train_on_inputs` = true puts loss on prompts, and \"{objective}\" compares answers");
            reject(root, "data.train_on_inputs", message, "take it out");
        }
        if self.lora.starts_from_rows() && (scores || is_grpo) {
            let message = format!(
                "`lora.init_lora_weights` = \"eva\" starts from the answers of the rows, and \"{objective}\" does not train on them"
            );
            reject(root, "lora.init_lora_weights", message, "take it out");
        }
        for (key, is_set) in
            [("eval.generate", !self.eval.generate.is_empty()), ("eval.task.metric", self.eval.task.metric.is_some())]
        {
            if scores && is_set {
                reject(root, key, format!("`{key}`: a model that scores answers writes no text"), "take it out");
            }
        }
        if scores && self.optimizer.name == OptimizerName::Muon {
            let message = "`optimizer.name` = \"muon\" trains matrices, and \"reward\" brings a vector";
            reject(root, "optimizer.name", message, "use \"adamw\"");
        }
        let (size, per_step) = (self.objective.steps_per_generation, self.train.gradient_accumulation_steps);
        if let Some(size) = size.filter(|size| !size.is_multiple_of(per_step)) {
            let message = format!(
                "`objective.steps_per_generation` = {size} is no multiple of `train.gradient_accumulation_steps` = {per_step}"
            );
            reject(root, "objective.steps_per_generation", message, "answers are written for whole steps");
        }
        if is_grpo && self.data.packing {
            reject(root, "data.packing", "`data.packing` packs rows, and \"grpo\" has prompts alone", "take it out");
        }
        if self.objective.needs_divergence() {
            self.hold_divergence(root);
        }
    }

    /// What is trained through the rounding of a file is nothing but a sum of 16 bits and A and B, and the last adapter is it.
    fn hold_shipping(&self, root: &mut Section<'_>) {
        if self.train.ship_as.is_none() {
            return;
        }
        let (lora, alone) = (&self.lora, "a weight is rounded with A and B alone");
        let objective = self.objective.name;
        let compares = matches!(objective, ObjectiveName::Dpo | ObjectiveName::Kto);
        for (key, is_in_the_way, why, hint) in [
            ("lora.use_dora", lora.use_dora, alone, "take it out"),
            ("lora.modules_to_save", lora.modules_to_save.is_some(), alone, "take it out"),
            ("lora.trainable_token_indices", lora.trainable_token_indices.is_some(), alone, "take it out"),
            (
                "lora.init_lora_weights",
                lora.starts_in_base(),
                "the adapter would start as a part of the base",
                "use init_lora_weights = true",
            ),
            (
                "model.quantization",
                self.model.quantization != Quantization::None,
                "weights are rounded once, from 16 bits",
                "take it out; with `model.residency = \"mapped\"` they stay on disk",
            ),
            ("model.init", self.model.init == Init::Random, "the file is made of the model's files", "take it out"),
            ("optimizer.name", self.optimizer.name == OptimizerName::ScheduleFreeAdamw, AVERAGE, "use \"adamw\""),
            ("optimizer.ema_decay", self.optimizer.ema_decay.is_some(), AVERAGE, "take it out"),
            (
                "eval.early_stopping_patience",
                self.eval.early_stopping_patience.is_some(),
                "the run could end before that part",
                "take it out",
            ),
            (
                "objective.name",
                compares,
                "the model before training is compared with, which is not rounded",
                "use \"simpo\", \"orpo\" or \"cpo\"",
            ),
            (
                "objective.name",
                matches!(objective, ObjectiveName::Reward | ObjectiveName::Grpo),
                "a file is trained for by rows alone",
                "train on answers, or leave `ship_as` out",
            ),
        ] {
            if is_in_the_way {
                reject(root, key, format!("`{key}` does not go with `train.ship_as`: {why}"), hint);
            }
        }
    }

    /// Answers to other prompts are there, a row each.
    fn hold_divergence(&self, root: &mut Section<'_>) {
        if self.data.packing {
            let message = "`data.packing`: \"kto\" asks about the answers to other prompts too, which are not packed";
            reject(root, "data.packing", message, "take it out, or use `loss_type = \"apo_zero_unpaired\"`");
        }
        if self.train.micro_batch_size < 2 {
            let message = "`train.micro_batch_size` = 1: \"kto\" measures how far the model has moved on the answers to the \
                           other prompts of a micro-batch";
            let hint = "use 4 or more, or `loss_type = \"apo_zero_unpaired\"`, which does not";
            reject(root, "train.micro_batch_size", message, hint);
        }
    }
}

/// Why averages are refused.
const AVERAGE: &str = "an average is written, and no step goes through its rounding";
