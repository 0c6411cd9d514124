"""Cells of wide tables know the headings of their columns."""

from service.dashboard.labelled import labelled

HEAD = (
    '<tr><th scope="col">Run</th><th scope="col"><abbr '
    'title="x">MFU</abbr></th><th>Step</th><th>Fit</th><th>Memory</th></tr>'
)
ROW = (
    '<tr><th scope="row"><div>TP 1</div></th><td class="number">4%</td><td>2 s</td><td></td><td '
    'class="number">–</td></tr>'
)


def page(head: str, *rows: str) -> str:
    return f"<h1>x</h1><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table><td>after</td>"  # noqa: E501


def test_each_cell_of_a_wide_table_has_the_heading_of_its_column() -> None:
    cells = (
        '<td data-heading="MFU" class="number">4%</td><td data-heading="Step">2 s</td><td '
        'data-heading="Fit" data-none></td>'
    )
    cells += '<td data-heading="Memory" data-none class="number">–</td>'
    row = f'<tr><th scope="row"><div>TP 1</div></th>{cells}</tr>'
    assert labelled(page(HEAD, ROW, ROW)) == page(HEAD, row, row).replace(
        "<table>", "<table data-rows>"
    )


def test_what_spans_columns_and_what_is_narrow_stay() -> None:
    spanning = '<tr><td colspan="4">No runs yet.</td></tr>'
    assert labelled(page(HEAD, spanning)) == page(HEAD, spanning).replace(
        "<table>", "<table data-rows>"
    )
    narrow = page(
        '<tr><th>Setting</th><th>First</th><th>Second</th><th class="spare">Third</th></tr>', ROW
    )
    assert labelled(narrow) == narrow
