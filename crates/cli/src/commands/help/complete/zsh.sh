#compdef holdfast
# Completion of holdfast for zsh. The program itself finds what can stand at the cursor.
_holdfast() {
    local files value about
    local -a values shown
    {
        IFS= read -r files
        while IFS=$'\t' read -r value about; do
            values+=("$value")
            shown+=("$value${about:+  -- $about}")
        done
    } < <("${words[1]}" complete -- "${(@Q)words[1,CURRENT]}" 2>/dev/null)
    (( $#values )) && compadd -l -d shown -a values
    case $files in
        files) _files ;;
        folders) _files -/ ;;
    esac
}
if [ "$funcstack[1]" = "_holdfast" ]; then
    _holdfast "$@"
else
    compdef _holdfast holdfast
fi
