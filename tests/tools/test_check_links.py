"""docs/check_links.py finds dead links in built pages."""


def test_files_and_anchors_that_are_not_there_are_found(load_script, tmp_path):
    check_links = load_script("docs/check_links.py")
    (tmp_path / "deep").mkdir()
    (tmp_path / "a b.html").write_text(
        '<h1 id="top">A</h1><a href="deep/b.html#there"></a><a href="#top"></a><img src="no.png"><a href="https://x.y/z">'
    )
    (tmp_path / "deep" / "b.html").write_text(
        '<p id="there"></p><a href="../a%20b.html"></a><a href="../a%20b.html#gone"></a><a href="c.html"></a>'
    )
    dead, n = check_links.dead_links(tmp_path)
    assert dead == ["a b.html: no.png", "deep/b.html: ../a%20b.html#gone", "deep/b.html: c.html"]
    assert n == 6
