//! The keys of a section: a row each, from which follow the struct, its default, its reading, the names in other trainers,
//! the effect on a resumed run, and recipes/reference.toml.
//!
//! To add a key: a row in its section's table, and the place that uses it.

use serde::Serialize;

use super::section::Section;
use super::suggest::Peer;

/// What another value of a key does to a run that is continued from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// How long it trains, what it writes down, where it is computed: every step means the same as before.
    None,
    /// Later steps are taken in another way.
    LaterSteps,
    /// A place in the rows means another one: sound only between two epochs.
    OtherRows,
    /// The adapter of the checkpoint is not the one that the recipe describes: never sound.
    OtherAdapter,
}

/// Names in other trainers, in lower case and with underscores, and what else has to be said.
pub type Names = (&'static [&'static str], Option<&'static str>);

/// A key of a section.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// What it means, in lines.
    pub sentence: &'static str,
    /// Its default as TOML; `None` where it has none.
    pub default: fn() -> Option<toml::Value>,
    /// A value as TOML, where the default shows none; of a list of sections, one of them as an inline table.
    pub example: Option<&'static str>,
    /// Its keys, where it is a section or a list of them.
    pub keys: &'static [Row],
    /// What another value does to a continued run; absent: what its section's row says, or its keys'.
    pub effect: Option<Effect>,
    /// Whether a finished run may have steps left with another value.
    pub adds_steps: bool,
    /// What other trainers call it.
    pub peers: &'static [Names],
}

/// A table of a recipe; `section!` makes it of rows.
pub trait Keys: Default + Serialize {
    /// Its keys.
    const ROWS: &'static [Row];

    /// Reads every key; one that is absent or wrong has its value in `default`.
    fn read(section: &mut Section<'_>, default: Self) -> Self;
}

/// The rows from the top to a key: of `data.train[0].path`, those of `data`, `train` and `path`.
#[must_use]
pub fn rows_to(rows: &'static [Row], key: &str) -> Vec<&'static Row> {
    let mut below = rows;
    let row = |part: &str| {
        let name = part.split('[').next().unwrap_or(part);
        let row = below.iter().find(|row| row.name == name)?;
        below = row.keys;
        Some(row)
    };
    key.split('.').map_while(row).collect()
}

/// What other trainers call the keys of a section; of its own before those of the sections below it.
#[must_use]
pub fn peers(rows: &'static [Row], section: &str) -> Vec<Peer> {
    let peer =
        |row: &Row, (names, note): &Names| Peer { names, section: section.into(), key: Some(row.name), note: *note };
    let own = rows.iter().flat_map(|row| row.peers.iter().map(move |names| peer(row, names)));
    let name = |row: &Row| if section.is_empty() { row.name.to_owned() } else { format!("{section}.{}", row.name) };
    own.chain(rows.iter().flat_map(|row| peers(row.keys, &name(row)))).collect()
}

/// Makes a section of a recipe of its rows: the sentence, which is the comment in recipes/reference.toml too; name, type
/// and default; the method of [`Section`] that reads it, and what that takes besides name and default; `like` an example,
/// where the default shows none; `of` the type of a section below; what another value does to a continued run (see
/// [`Effect`]), `+ steps` where it may add some; names in other trainers, some of them with a note.
///
/// `then check` names a method that checks what has been read, and `with` adds fields that are no keys.
macro_rules! section {
    (
        $(#[$meta:meta])*
        pub struct $Section:ident $(then $check:ident)? {
            $($(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr => $reader:ident($($argument:expr),*)
                $(like $example:tt)? $(of $below:ty)?
                $(, $effect:ident $(+ $steps:ident)?)?
                $(, [$($peer:literal),+ $(; $note:literal)?])*;)+
        }
        $(with { $($(#[$more_meta:meta])+ pub $more:ident: $more_type:ty,)+ })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $Section {
            $($(#[doc = $doc])+ pub $name: $type,)+
            $($($(#[$more_meta])+ pub $more: $more_type,)+)?
        }

        impl Default for $Section {
            fn default() -> Self {
                Self { $($name: $default,)+ $($($more: <$more_type>::default(),)+)? }
            }
        }

        impl $crate::schema::Keys for $Section {
            const ROWS: &'static [$crate::schema::Row] = &[$($crate::schema::Row {
                name: stringify!($name),
                sentence: concat!($($doc, "\n"),+),
                default: || toml::Value::try_from::<$type>($default).ok(),
                example: $crate::schema::section!(@option $(stringify!($example))?),
                keys: $crate::schema::section!(@rows $($below)?),
                effect: $crate::schema::section!(@option $($crate::schema::Effect::$effect)?),
                adds_steps: $crate::schema::section!(@is $($($steps)?)?),
                peers: &[$((&[$($peer),+], $crate::schema::section!(@option $($note)?))),*],
            }),+];

            fn read(section: &mut $crate::schema::Section<'_>, default: Self) -> Self {
                let read = Self {
                    $($name: section.$reader(stringify!($name), default.$name $(, $argument)*),)+
                    $($($more: default.$more,)+)?
                };
                read$(.$check(section))?
            }
        }
    };
    (@option) => { None };
    (@option $value:expr) => { Some($value) };
    (@is) => { false };
    (@is $steps:ident) => { true };
    (@rows) => { &[] };
    (@rows $below:ty) => { <$below as $crate::schema::Keys>::ROWS };
}

pub(crate) use section;
