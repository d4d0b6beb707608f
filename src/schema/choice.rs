//! Words that stand for the values of an enum.

/// A type whose values recipes write as one of a few words.
pub trait Choice: Copy + PartialEq + 'static {
    /// The words and their values.
    const NAMES: &'static [(&'static str, Self)];
    /// Words of other trainers, with our words for the same value.
    const PEERS: &'static [(&'static str, &'static str)] = &[];
    /// How words of other trainers begin that have none here, in lower case, and what to do instead.
    const NOTES: &'static [(&'static [&'static str], &'static str)] = &[];

    /// Its word in a recipe.
    #[must_use]
    fn word(self) -> &'static str {
        Self::NAMES.iter().find(|(_, value)| *value == self).map_or("", |(word, _)| word)
    }
}

/// Generates an enum whose values are words of recipes: a row has the variant, its word, and in brackets words of other trainers for
/// the same value; behind the rows may be [`Choice::NOTES`].
macro_rules! choice {
    (
        $(#[$meta:meta])*
        pub enum $Choice:ident {
            $($(#[$variant_meta:meta])* $Variant:ident = $word:literal $(, [$($peer:literal),+])?;)+
        }
        $(notes $notes:tt)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        pub enum $Choice {
            $($(#[$variant_meta])* #[serde(rename = $word)] $Variant,)+
        }

        impl $crate::schema::Choice for $Choice {
            const NAMES: &'static [(&'static str, Self)] = &[$(($word, Self::$Variant)),+];
            const PEERS: &'static [(&'static str, &'static str)] = &[$($($(($peer, $word)),+,)?)+];
            $(const NOTES: &'static [(&'static [&'static str], &'static str)] = &$notes;)?
        }
    };
}
pub(crate) use choice;
