use super::*;

const PIXTRAL: Cutting = Cutting::Whole { longest_edge: 1540 };
const SMOLVLM: Cutting = Cutting::Squares { longest_edge: 2048, side: 512, is_cut: true };

#[test]
fn images_become_as_many_tokens_as_pixtral_makes_of_them() {
    // Sizes and rows by columns of `_get_num_multimodal_tokens`.
    for (size, expected) in [
        ([1280, 960], [35, 46]),
        ([1, 1], [1, 1]),
        ([1540, 1540], [55, 55]),
        ([1541, 29], [1, 55]),
        ([4000, 3000], [42, 55]),
        ([3000, 4001], [55, 42]),
    ] {
        let Cut { tokens: Grid { rows, columns }, sizes, squares, .. } = PIXTRAL.cut(size, None, 28).unwrap();
        assert_eq!([rows, columns], expected, "{size:?}");
        assert_eq!((sizes, squares), (vec![[28 * columns, 28 * rows]], None));
    }
    let smaller = PIXTRAL.cut([1280, 960], Some(640 * 480), 28).unwrap();
    assert_eq!(smaller.tokens, Grid { rows: 18, columns: 23 });
    assert_eq!(smaller.text(PIXTRAL).matches("[IMG_BREAK]").count(), 17);
    assert!(PIXTRAL.cut([9000, 1], None, 28).unwrap_err().contains("too thin"));
}

#[test]
fn images_are_cut_into_the_squares_of_smolvlm() {
    let seen = |size, most| SMOLVLM.cut(size, most, 64).unwrap();
    let cut = seen([1280, 960], None);
    assert_eq!(cut.sizes, [[2048, 1536], [2048, 1536]]);
    assert_eq!((cut.squares, cut.num_tokens()), (Some(Grid { rows: 3, columns: 4 }), 13 * 64));
    // Small ones are made larger, thin ones are stretched.
    assert_eq!(seen([1, 1], None).num_pieces(), 17);
    assert_eq!(seen([9000, 50], None).sizes, [[2048, 12], [2048, 512]]);
    assert_eq!(seen([100, 199], None).sizes, [[1030, 2048], [1536, 2048]]);
    let smaller = seen([1280, 960], Some(1 << 20));
    assert_eq!((&smaller.sizes[1], smaller.num_pieces()), (&[1024, 1024], 5));
    let least = seen([1280, 960], Some(1));
    assert_eq!((least.squares, least.num_tokens()), (None, 64));
    let whole = Cutting::Squares { longest_edge: 2048, side: 512, is_cut: false }.cut([1280, 960], None, 64).unwrap();
    assert_eq!((whole.sizes, whole.squares), (vec![[2048, 1536], [512, 512]], None));

    let around = |what: &str, tokens: usize| format!("<fake_token_around_image>{what}{}", "<image>".repeat(tokens));
    let end = "<fake_token_around_image>";
    assert_eq!(least.text(SMOLVLM), around("<global-img>", 64) + end);
    let two = SMOLVLM.cut([100, 50], Some(1024 * 512), 256).unwrap();
    let expected = [
        around("<row_1_col_1>", 4),
        around("<row_1_col_2>", 4),
        "\n\n".to_owned(),
        around("<global-img>", 4),
        end.to_owned(),
    ];
    assert_eq!(two.text(SMOLVLM), expected.concat());
}

#[test]
fn images_keep_their_shape_within_the_areas_of_qwen() {
    let area = Cutting::Area { side: 32, least: 65_536, most: 16_777_216 };
    let seen = |size, most| area.cut(size, most, 32);
    // Sizes and rows by columns of `smart_resize`.
    for (size, rows_by_columns) in [
        ([1280, 960], [30, 40]),
        ([1, 1], [8, 8]),
        ([4000, 3000], [94, 125]),
        ([9000, 50], [2, 281]),
        ([9000, 7000], [112, 145]),
        ([300, 208], [7, 10]),
        ([624, 656], [20, 20]),
        ([16, 48], [14, 5]),
    ] {
        let Cut { tokens: Grid { rows, columns }, sizes, .. } = seen(size, None).unwrap();
        assert_eq!([rows, columns], rows_by_columns, "{size:?}");
        assert_eq!(sizes, [[32 * columns, 32 * rows]]);
    }
    assert_eq!(seen([1280, 960], Some(320 * 240)).unwrap().tokens, Grid { rows: 7, columns: 10 });
    assert_eq!(seen([1280, 960], Some(1)).unwrap().num_tokens(), 1);
    assert!(seen([9000, 44], None).unwrap_err().contains("200 times"));
    let text = seen([32, 32], Some(1024)).unwrap().text(area);
    assert_eq!(text, area.marker());
}

#[test]
fn images_are_stretched_to_the_canvas_of_internvl() {
    let canvas = Cutting::Canvas { side: 448, least: 1, most: 12 };
    let seen = |size, most| canvas.cut(size, most, 28).unwrap();
    // Of 1 x 1, 2 x 2 and 3 x 3 the largest that the image fills by half.
    for (size, squares) in
        [([100, 100], 1), ([640, 640], 4), ([950, 950], 4), ([951, 951], 9), ([1280, 960], 12), ([900, 90], 10)]
    {
        let cut = seen(size, None);
        assert_eq!(cut.squares.map_or(1, Grid::count), squares, "{size:?}");
        assert_eq!(cut.num_tokens(), 256 * if squares == 1 { 1 } else { squares + 1 });
    }
    assert_eq!(seen([1280, 960], None).sizes, [[4 * 448, 3 * 448]]);
    assert_eq!(seen([1280, 960], Some(448 * 448)).sizes, [[448, 448]]);
    let text = seen([100, 100], Some(1)).text(canvas);
    assert!(text.starts_with("<img><IMG_CONTEXT>") && text.ends_with("</img>"));
}
